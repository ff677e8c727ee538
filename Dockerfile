# otafl on a CPU: docker build -t otafl . && docker run --rm -v "$PWD:/work" otafl run quick
FROM python:3.12-slim
WORKDIR /opt/otafl
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[plot]"
WORKDIR /work
ENTRYPOINT ["otafl"]
CMD ["--help"]
