# The daemon's image. In a sidecar beside a trainer, or on its own:
#
#     docker build -t rollmux .
#     docker run --rm --network host rollmux serve --replica http://gpu1:8000
#
# BASE_IMAGE needs python3 (3.11 or newer) with venv; both stages use it, so that the
# virtual environment fits. Where packages come from is a matter of the machine that builds: give
# its pip.conf as a secret (--secret id=pip.conf,src=...), which no layer keeps.
ARG BASE_IMAGE=python:3.13-slim

FROM ${BASE_IMAGE} AS build
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf,mode=0444 \
    set -eu; \
    python3 -m venv /build; \
    /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /dist .; \
    python3 -m venv --without-pip /opt/rollmux; \
    # --only-binary: there is no compiler, here or in the last stage. zstd: for --record NAME.zst.
    /build/bin/pip --python /opt/rollmux/bin/python install --no-cache-dir --compile \
        --only-binary :all: --constraint constraints.txt "$(echo /dist/*.whl)[zstd]"; \
    # A place that does not depend on Python's version, for who copies it to a replica.
    mkdir /opt/rollmux/replica; \
    cp deploy/replica/rollmux_push.py /opt/rollmux/replica/

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="rollmux" \
      org.opencontainers.image.description="Makes many vLLM replicas look like one vLLM server" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/rollmux /opt/rollmux
ENV PATH=/opt/rollmux/bin:$PATH
WORKDIR /opt/rollmux
# By number, so that Kubernetes can tell that it is not root. It owns nothing; only /tmp is written.
USER 65532:65532
EXPOSE 8000
# The drain at SIGTERM takes up to ROLLMUX_DRAIN_S (20 s): docker's default of 10 s is too short
# for it, give `docker stop --time 30`.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-m", "deploy.live"]
ENTRYPOINT ["rollmux"]
CMD ["serve"]
