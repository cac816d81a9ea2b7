FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin reprise

FROM debian:bookworm-slim
# Webhooks to https addresses are checked against the system's certificates.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --user-group --no-create-home reprise
COPY --from=build /src/target/release/reprise /usr/local/bin/reprise
USER reprise
# The image holds no PostgreSQL: give it DATABASE_URL.
# Listening on all addresses is for the container alone; what is published is up to whoever runs it. It needs API_KEYS.
ENV BIND_ADDR=0.0.0.0 PORT=8085
EXPOSE 8085
# The shell's own TCP is enough to ask; the image needs no HTTP client.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/$PORT && printf 'GET /ready HTTP/1.0\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["reprise"]
