import pytest

from semantide.kernels import native


@pytest.fixture(params=["basic", "avx2", "avx512"])
def instructions(request):
    """Each instruction set of the C++ kernels that this machine has."""
    library = native.library()
    if library is None:
        pytest.skip("the C++ kernels are not built: run `make native`")
    library.semantide_limit(["basic", "avx2", "avx512"].index(request.param))
    try:
        if native.instructions() != request.param:
            pytest.skip(f"this processor has no {request.param}")
        yield request.param
    finally:
        library.semantide_limit(2)
