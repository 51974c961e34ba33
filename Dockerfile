# The OpenAI-compatible server of a plan:
#   docker build -t outrider .
#   docker run -v "$PWD/my-plan:/plan:ro" -p 8000:8000 outrider
# Other commands follow the image's name: docker run ... outrider generate /plan --prompt "..."
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --no-install-recommends --yes g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels --constraint tools/constraints.txt ".[serve]"

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-index --find-links /wheels "outrider[serve]" && rm -rf /wheels
RUN useradd --create-home outrider
USER outrider
EXPOSE 8000
ENTRYPOINT ["outrider"]
CMD ["serve", "/plan", "--host", "0.0.0.0"]
