//! The actions of a task as the API shows them.

use serde::Serialize;
use utoipa::ToSchema;

use crate::domain::webhook::{Action, ActionKind, Actions, WebhookParams};

/// An action of a task.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TaskAction {
    /// When Reprise calls the action.
    pub trigger: ActionTrigger,
    /// With the trigger `End`: how the task ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<ActionCondition>,
    pub kind: ActionKind,
    pub params: WebhookParams,
}

/// What an action is called for: the start of a run, the end of the task, a scheduled retry, or a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub enum ActionTrigger {
    Start,
    End,
    Retry,
    Cancel,
}

/// The end for which an action with the trigger `End` is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub enum ActionCondition {
    Success,
    Failure,
}

impl TaskAction {
    /// Lists the actions of a task in the order in which a task may call them.
    pub fn list(actions: Actions) -> Vec<TaskAction> {
        let Actions { on_start, on_success, on_failure, on_retry, cancel } = actions;
        let end = |condition| move |action| TaskAction::new(ActionTrigger::End, Some(condition), action);
        let plain = |trigger| move |action| TaskAction::new(trigger, None, action);
        let start = on_start.into_iter().map(plain(ActionTrigger::Start));
        start
            .chain(on_success.into_iter().map(end(ActionCondition::Success)))
            .chain(on_failure.into_iter().map(end(ActionCondition::Failure)))
            .chain(on_retry.into_iter().map(plain(ActionTrigger::Retry)))
            .chain(cancel.into_iter().map(plain(ActionTrigger::Cancel)))
            .collect()
    }

    fn new(trigger: ActionTrigger, condition: Option<ActionCondition>, action: Action) -> TaskAction {
        TaskAction { trigger, condition, kind: action.kind, params: action.params }
    }
}
