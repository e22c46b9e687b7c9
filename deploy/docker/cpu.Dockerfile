# evenflow with its own engine, on CPUs (x86-64 and ARM). From the root of the checkout:
#   docker build -f deploy/docker/cpu.Dockerfile -t evenflow .
#   docker run --rm -p 8000:8000 -v evenflow:/cache evenflow

FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# Given the address of PyTorch's wheels without CUDA, pip finds them, and the image is 3 GB smaller.
ARG PIP_EXTRA_INDEX_URL

# At its first start, evenflow compiles its kernels for the CPU that it runs on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

COPY constraints.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "$(echo /wheels/evenflow-*.whl)[engine,otel]"

RUN useradd --uid 10001 --no-create-home --home-dir /cache evenflow \
    && install --directory --owner evenflow --group evenflow /cache
USER 10001
# Models, compiled kernels and measured step times. Keep it in a volume.
ENV EVENFLOW_CACHE=/cache/evenflow \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1
VOLUME /cache
WORKDIR /cache

EXPOSE 8000
# The server drains open requests after SIGTERM: give `docker stop --time` more than --drain-time (30 s).
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]

ENTRYPOINT ["evenflow"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
