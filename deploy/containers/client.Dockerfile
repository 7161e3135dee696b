# The exporter, an operator's commands, and what only submits and reads: no torch, no GPU. From the checkout's root:
#   docker build -f deploy/containers/client.Dockerfile -t rolloutmq-client .
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir '/src[cli,metrics,text,journal,otel]' && rm -rf /src
RUN useradd --uid 10001 --home-dir /tmp --no-create-home rolloutmq
USER 10001:10001
WORKDIR /tmp
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["tini", "--", "rolloutmq"]
CMD ["--help"]
