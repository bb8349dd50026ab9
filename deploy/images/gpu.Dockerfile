# Control plane, drivers and all functions, with vLLM's CUDA build. From the repository's root:
#
#   docker build -f deploy/images/gpu.Dockerfile -t rlhfless:0.2.0 .
#
# Pin the base by digest where builds must be the same to the bit.
FROM python:3.11.13-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/rlhfless
ENV PATH=/opt/rlhfless/bin:$PATH
COPY requirements/gpu.txt /tmp/gpu.txt
RUN pip install --no-cache-dir --no-deps -r /tmp/gpu.txt
COPY . /src
RUN pip install --no-cache-dir --no-deps /src

FROM python:3.11.13-slim-bookworm
# Triton compiles kernels when an engine starts. KubeRay's probes call wget.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/* && useradd --uid 1000 --create-home rlhfless
COPY --from=build /opt/rlhfless /opt/rlhfless
COPY examples /opt/rlhfless/examples
ENV PATH=/opt/rlhfless/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
# Where nodes mount the driver instead of running NVIDIA's container runtime (GKE), and what that runtime mounts elsewhere.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 PATH=$PATH:/usr/local/nvidia/bin \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /tmp
CMD ["rlhfless", "--help"]
