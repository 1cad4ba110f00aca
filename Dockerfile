# syntax=docker/dockerfile:1
# Run with a memory limit above --dram (segments are memfds: --shm-size does not matter) and a volume on /var/lib/kvstored.
# Engines in other containers share /run/kvstored (the socket's directory) and nothing else.
# `docker build .` is the slim image; `docker build --target gpu --build-arg CUDA=12 .` has CuPy for the GPU tier (docs/gpu.md).
FROM python:3.12-slim AS installed
# the client's copies in C; without a compiler they are left out
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements.lock pyproject.toml setup.py README.md LICENSE ./
COPY kvstored ./kvstored
RUN python -m venv /opt/kvstored \
 && /opt/kvstored/bin/pip install --no-cache-dir --constraint requirements.lock .

FROM installed AS installed-slim
RUN /opt/kvstored/bin/pip uninstall --yes pip

FROM installed AS installed-gpu
ARG CUDA=13
# [ctk]: NVRTC and the other libraries of CUDA; the driver is the host's
RUN /opt/kvstored/bin/pip install --no-cache-dir --constraint requirements.lock "cupy-cuda${CUDA}x[ctk]>=14" \
 && /opt/kvstored/bin/pip uninstall --yes pip

FROM python:3.12-slim AS base
RUN useradd --system --uid 7439 --home-dir /var/lib/kvstored --shell /usr/sbin/nologin kvstored \
 && install -d -o kvstored -g kvstored -m 0750 /var/lib/kvstored /run/kvstored
ENV PATH=/opt/kvstored/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    KVSTORED_STATE_DIR=/var/lib/kvstored \
    KVSTORED_SOCKET=/run/kvstored/kvstored.sock \
    KVSTORED_LISTEN=unix:/run/kvstored/grpc.sock \
    KVSTORED_METRICS_LISTEN=0.0.0.0:7440 \
    KVSTORED_LOG_FORMAT=json
USER kvstored
VOLUME ["/var/lib/kvstored", "/run/kvstored"]
EXPOSE 7440
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:7440/healthz', timeout=2)"]
ENTRYPOINT ["kvstored"]
CMD ["serve"]

FROM base AS gpu
COPY --from=installed-gpu /opt/kvstored /opt/kvstored
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUPY_CACHE_DIR=/var/lib/kvstored/cupy \
    KVSTORED_HBM_DEVICES=0

FROM base AS slim
COPY --from=installed-slim /opt/kvstored /opt/kvstored
