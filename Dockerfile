FROM python:3.11.14-slim-bookworm AS build
# What is built is the same each time: no file has the time of the build, nor does compiled code have that of its source.
ENV SOURCE_DATE_EPOCH=1577836800
WORKDIR /src
COPY requirements/runtime.txt requirements/uv.txt requirements/
RUN python -m venv /opt/halfway \
    && /opt/halfway/bin/pip install --no-cache-dir --no-compile --require-hashes -r requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY coordinator coordinator
COPY adapters adapters
COPY pipeline pipeline
COPY schemas schemas
RUN /opt/halfway/bin/pip install --no-cache-dir --no-compile --no-deps .
COPY packaging packaging
RUN /opt/halfway/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /opt/client ./packaging/client \
    && python -m compileall -qf --invalidation-mode unchecked-hash /opt/halfway \
    && find /opt -exec touch --no-dereference --date=@$SOURCE_DATE_EPOCH {} +

FROM python:3.11.14-slim-bookworm AS base
RUN echo 'halfway:x:10001:' >> /etc/group && echo 'halfway:x:10001:10001::/nonexistent:/usr/sbin/nologin' >> /etc/passwd
COPY --from=build /opt/halfway /opt/halfway
ENV PATH=/opt/halfway/bin:$PATH PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="halfway" \
    org.opencontainers.image.description="Transactional (half) messages for the Kafka you already run" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.base.name="docker.io/library/python:3.11.14-slim-bookworm"
USER 10001:10001

# The example order service: `docker compose --profile orders up`.
FROM base AS orders
COPY examples/orders/payments.py examples/orders/serve.py examples/orders/service.py /opt/shop/examples/orders/
USER root
COPY --from=build /opt/client /opt/client
RUN /opt/halfway/bin/pip install --no-cache-dir --no-compile --no-deps /opt/client/*.whl
RUN install --directory --owner 10001 --group 10001 /var/lib/orders
USER 10001:10001
VOLUME /var/lib/orders
EXPOSE 9000
WORKDIR /opt/shop
ENTRYPOINT ["python", "-m", "examples.orders.serve", "--database", "/var/lib/orders/orders.sqlite"]

FROM base AS coordinator
# docker build --build-arg VERSION=0.1.0 --build-arg REVISION=$(git rev-parse HEAD)
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION
EXPOSE 8080 8081
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["/bin/bash", "-ec", "exec 3<>/dev/tcp/127.0.0.1/8081; printf 'GET /health/live HTTP/1.0\\r\\n\\r\\n' >&3; read -r _ status _ <&3; [ \"$status\" = 200 ]"]
ENTRYPOINT ["halfway"]
CMD ["serve"]
