# Surefoot with the extras of language, data, hub and the inspector.
#
#   docker build -t surefoot .
#   docker run --rm -it -v "$PWD/runs:/home/surefoot/runs" surefoot demo
#
# With CUDA: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and docker run --gpus all.
FROM python:3.11-slim
ARG TORCH_INDEX="https://download.pytorch.org/whl/cpu"
WORKDIR /opt/surefoot
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir --no-deps -c constraints.txt --index-url "$TORCH_INDEX" torch \
 && pip install --no-cache-dir -c constraints.txt ".[language,data,hub,inspector,plots]" \
 && useradd --create-home surefoot
USER surefoot
WORKDIR /home/surefoot
ENTRYPOINT ["surefoot"]
CMD ["--help"]
