FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin reprise

FROM debian:bookworm-slim
# The client verifies https receivers with the certificates of the system.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --user-group --no-create-home reprise
COPY --from=build /src/target/release/reprise /usr/local/bin/reprise
USER reprise
# The image contains no PostgreSQL. Set DATABASE_URL.
# The service listens on all addresses of the container, so it needs API_KEYS. The operator decides which ports to publish.
ENV BIND_ADDR=0.0.0.0 PORT=8085
EXPOSE 8085
# Bash opens the connection itself, so the image needs no HTTP client.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/$PORT && printf 'GET /ready HTTP/1.0\\r\\n\\r\\n' >&3 && read -r _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["reprise"]
