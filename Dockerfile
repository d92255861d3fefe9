# A server for NVIDIA GPUs, CUDA 13. This file was written without Docker at hand: nobody has built it yet.
#   docker build -t redrafter .
#   export REDRAFTER_API_KEY=...
#   docker run --gpus all -p 8000:8000 -v ~/.cache/huggingface:/models -e REDRAFTER_API_KEY redrafter \
#       serve --host 0.0.0.0 --target hub-id --drafter hub-id
# On a command line, as --api-key, everybody on the machine could read the key.
# CUDA's libraries come from PyPI with the extra `cuda`; the host needs a driver for CUDA 13 (580 or newer) and NVIDIA's
# container toolkit.
FROM python:3.12-slim

COPY constraints.txt pyproject.toml README.md LICENSE /source/
COPY redrafter_jax /source/redrafter_jax
COPY pallas_kernels /source/pallas_kernels
COPY train /source/train
COPY eval /source/eval
RUN pip install --no-cache-dir --constraint /source/constraints.txt --build-constraint /source/constraints.txt \
    '/source[serve,structured,train,cuda]' && rm -rf /source

ENV HF_HOME=/models
EXPOSE 8000
ENTRYPOINT ["redrafter"]
CMD ["--help"]
