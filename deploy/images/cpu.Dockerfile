# Control plane, drivers and all functions, with vLLM's CPU build: for a trial without GPUs. From the repository's root:
#
#   docker build -f deploy/images/cpu.Dockerfile -t rlhfless:0.2.0-cpu .
FROM python:3.11.13-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
COPY scripts /src/scripts
COPY requirements /src/requirements
COPY pyproject.toml README.md /src/
COPY rlhfless /src/rlhfless
COPY functions /src/functions
COPY sim /src/sim
COPY examples /src/examples
COPY deploy/images/content.sh /src/deploy/images/content.sh
# The set-up of the tests is the set-up of the image: one list of pins. The test tools are left out.
RUN cd /src && : > requirements/test.txt && export RLHFLESS_HOME=/build \
    && deploy/images/content.sh "$(scripts/setup.sh)"

FROM python:3.11.13-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/* && useradd --uid 1000 --create-home rlhfless
COPY --from=build /opt/rlhfless /opt/rlhfless
ENV PATH=/opt/rlhfless/venv/bin:$PATH PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /tmp
CMD ["rlhfless", "--help"]
