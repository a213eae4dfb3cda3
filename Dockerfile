# One image for every process of Semantide: `semantide api all`, `semantide worker ROOM`, and the command line.
# Arguments:
#   BASE         a base with Python 3.11 or newer; an accelerator's vendor image for NVIDIA or Ascend
#   TORCH_INDEX  index of torch's wheels for this image: the address of the CPU wheels (torch's installation page has it).
#                Empty: torch comes from the default index, whose x86-64 wheel carries CUDA libraries, several GB.
#   EXTRAS       extras of the package, separated by spaces, as in "s3 text" or "npu"
# A pip configuration (mirror, credentials) is given as a build secret and stays out of the image: --secret id=pip,src=pip.conf
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=""
ARG EXTRAS=""
ENV PATH=/opt/semantide/bin:${PATH} PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/semantide
WORKDIR /build
# torch first, then the other dependencies, then our code: a change of code rebuilds the last layer alone.
# torch comes alone from its index, which need not have the pinned versions of what torch stands on; those follow with the rest.
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install ${TORCH_INDEX:+--no-deps --index-url "${TORCH_INDEX}"} --constraint constraints.txt torch
COPY pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    EXTRAS="${EXTRAS}" python -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *(need for extra in os.environ['EXTRAS'].split() for need in project['optional-dependencies'][extra]), sep='\n')" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt \
    && python -c "import torch; print('torch', torch.__version__, '' if torch.version.cuda is None else 'carries CUDA libraries: TORCH_INDEX chooses a smaller build')"
# The C++ kernels want a compiler in this stage; a base without one and without apt gets the slower torch references.
RUN command -v c++ > /dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; } \
    || echo "no C++ compiler: the image will run the torch references"
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-deps . && python -m pip uninstall --yes pip

FROM ${BASE}
RUN groupadd --gid 10001 semantide \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin semantide \
    && mkdir /data && chown 10001:10001 /data
COPY --from=build /opt/semantide /opt/semantide
# In a container the APIs listen on every address, so they refuse to start until SEMANTIDE_API_KEYS is set.
ENV PATH=/opt/semantide/bin:${PATH} \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SEMANTIDE_DATA_DIR=/data \
    SEMANTIDE_IMPORT_ROOTS=/data/uploads \
    SEMANTIDE_HOST=0.0.0.0 \
    SEMANTIDE_PORT=8000
WORKDIR /data
USER 10001:10001
EXPOSE 8000
# A worker has no API: with SEMANTIDE_METRICS_PORT set, its metrics page is what must answer.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as web; port = os.environ.get('SEMANTIDE_METRICS_PORT'); web.urlopen(f'http://127.0.0.1:{port}/metrics' if port else f'http://127.0.0.1:{os.environ[\"SEMANTIDE_PORT\"]}/healthz', timeout=4)"]
ENTRYPOINT ["semantide"]
CMD ["--help"]
