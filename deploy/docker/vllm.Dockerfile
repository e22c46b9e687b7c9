# evenflow steering vLLM on NVIDIA GPUs. From the root of the checkout:
#   docker build -f deploy/docker/vllm.Dockerfile -t evenflow-vllm .
#   docker run --rm --gpus all --ipc host -p 8000:8000 -v huggingface:/root/.cache/huggingface \
#     evenflow-vllm --model Qwen/Qwen2.5-7B-Instruct --tbt-target 50ms

ARG VLLM_VERSION=0.32.0

FROM python:3.12-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM vllm/vllm-openai:v${VLLM_VERSION}
# Without extras: vLLM's image has torch and the server's packages, in the versions that vLLM needs.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir /wheels/evenflow-*.whl \
    && python3 -m evenflow doctor

ENV PYTHONUNBUFFERED=1
EXPOSE 8000
STOPSIGNAL SIGTERM
# vLLM may take minutes to load a model; /health is 503 until then.
HEALTHCHECK --interval=10s --timeout=3s --start-period=15m \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]

ENTRYPOINT ["python3", "-m", "evenflow", "serve", "--engine", "vllm", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--model", "Qwen/Qwen2.5-0.5B-Instruct", "--tbt-target", "50ms"]
