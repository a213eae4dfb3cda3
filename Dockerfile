# The images of Semantide:
#   docker build .                      every process but the operator: `semantide api all`, `semantide worker ROOM`, jobs, the command line
#   docker build --target operator .    the operator: no torch, no shell
#   docker build --target sbom --output bill .    what both are made of, as CycloneDX JSON
# Arguments:
#   BASE         a base with Python 3.11 or newer; an accelerator's vendor image for NVIDIA or Ascend
#   TORCH_INDEX  index of torch's wheels for this image: the address of the CPU wheels (torch's installation page has it).
#                Empty: torch comes from the default index, whose x86-64 wheel carries CUDA libraries, several GB.
#   EXTRAS       extras of the package, separated by spaces, as in "cluster s3 text" or "cluster npu"; cluster: jobs may be NPUJobs
# A pip configuration (mirror, credentials) is given as a build secret and stays out of the image: --secret id=pip,src=pip.conf
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/semantide
ENV PATH=/opt/semantide/bin:${PATH}
# The C++ kernels want a compiler, and the cut of unread symbols its tools; a base without them and without apt gets the slower torch references.
RUN command -v c++ > /dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; } \
    || echo "no C++ compiler: the image will run the torch references"
WORKDIR /build

# torch, the other dependencies and our code are layers of their own: a change of code sends the last one, of a few MB, anew.
# torch comes alone from its index, which need not have the pinned versions of what torch stands on; those follow with the rest.
FROM venv AS torch
ARG TORCH_INDEX=""
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-compile ${TORCH_INDEX:+--no-deps --index-url "${TORCH_INDEX}"} --constraint constraints.txt torch \
    && python -c "import importlib.metadata as m; files = [str(f) for f in m.files('torch')]; print('torch', m.version('torch'), 'carries CUDA libraries: TORCH_INDEX chooses a smaller build' if any('libtorch_cuda' in f for f in files) else '')"

FROM torch AS dependencies
ARG EXTRAS="cluster"
COPY pyproject.toml docker/requirements.py ./
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    python requirements.py ${EXTRAS} > requirements.txt \
    && pip install --no-compile --root /rest --constraint constraints.txt --requirement requirements.txt
COPY docker/trim.py docker/compiled.py ./
# torch loads torch_npu by itself, which fails where the image is built: there is no driver.
RUN python -m pip uninstall --yes pip && python trim.py /opt/semantide /rest && TORCH_DEVICE_BACKEND_AUTOLOAD=0 python compiled.py /opt/semantide /rest

FROM venv AS code
COPY LICENSE README.md pyproject.toml ./
COPY client client
COPY kernels kernels
COPY operators operators
COPY services services
COPY shared shared
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    pip install --no-deps --root /code .

# The operator: its own environment, then an empty root with nothing but what that needs.
FROM venv AS operator-environment
RUN python3 -m venv /opt/operator
COPY constraints.txt pyproject.toml docker/requirements.py ./
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=secret,id=pip,target=/etc/pip.conf \
    python requirements.py --only operator > requirements.txt \
    && /opt/operator/bin/pip install --constraint constraints.txt --requirement requirements.txt
COPY docker/trim.py ./
RUN python trim.py /opt/operator
COPY --from=code /code/opt/semantide/lib /opt/operator/lib
RUN cd /opt/operator/lib/python3*/site-packages/semantide && rm -rf client kernels services && find . -name __pycache__ -prune -exec rm -rf {} +
COPY docker/bare_root.py docker/bill_of_materials.py ./
RUN /opt/operator/bin/python bare_root.py /root-of-operator /opt/operator \
    && /opt/operator/bin/python bill_of_materials.py semantide-operator /root-of-operator > operator.json

FROM scratch AS operator
COPY --from=operator-environment /root-of-operator /
ENV PATH=/opt/operator/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["/opt/operator/bin/python", "-m", "semantide.operators"]

FROM ${BASE} AS whole
RUN groupadd --gid 10001 semantide \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin semantide \
    && mkdir /data && chown 10001:10001 /data
COPY --from=dependencies /opt/semantide /opt/semantide
COPY --from=dependencies /rest /
COPY --from=code /code /
# In a container the APIs listen on every address, so they refuse to start until SEMANTIDE_API_KEYS is set.
ENV PATH=/opt/semantide/bin:${PATH} \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SEMANTIDE_DATA_DIR=/data \
    SEMANTIDE_IMPORT_ROOTS=/data/uploads \
    SEMANTIDE_HOST=:: \
    SEMANTIDE_PORT=8000
# What was cut out or did not fit together shows here and not at a customer's.
RUN TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c "import torch, polars, pyarrow.parquet, pyarrow.compute, pyarrow.fs, uvloop, sklearn.feature_extraction.text, scipy.optimize; import semantide.services.local"
WORKDIR /data
USER 10001:10001
EXPOSE 8000
# A worker has no API: with SEMANTIDE_METRICS_PORT set, its metrics page is what must answer.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=4 \
    CMD ["python", "-c", "import os, urllib.request as web; port = os.environ.get('SEMANTIDE_METRICS_PORT'); web.urlopen(f'http://127.0.0.1:{port}/metrics' if port else f'http://127.0.0.1:{os.environ[\"SEMANTIDE_PORT\"]}/healthz', timeout=4)"]
ENTRYPOINT ["semantide"]
CMD ["--help"]

FROM whole AS bill
USER 0
WORKDIR /bill
COPY docker/bill_of_materials.py ./
RUN python bill_of_materials.py semantide > semantide.json

FROM scratch AS sbom
COPY --from=bill /bill/semantide.json /
COPY --from=operator-environment /build/operator.json /

# The last stage is what `docker build .` makes.
FROM whole AS semantide
