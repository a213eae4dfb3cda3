"""``python -m semantide.operators``: the operator, until it is told to stop."""

from __future__ import annotations

import argparse
import sys

from pydantic import ValidationError

from semantide.operators.operator import Operator, start_log
from semantide.operators.settings import OperatorSettings
from semantide.shared.errors import PermanentError


def main() -> int:
    """Parse and run; the exit status."""
    argparse.ArgumentParser(
        prog="python -m semantide.operators",
        description="Runs NPUJobs and NPUServices of a Kubernetes cluster. Settings are environment variables that begin with SEMANTIDE_OPERATOR_.",
    ).parse_args()
    try:
        settings = OperatorSettings()
    except ValidationError as error:
        sys.stderr.write(f"semantide operator: {error}\n")
        return 2
    start_log(settings.log_level)
    try:
        operator = Operator(settings)
    except PermanentError as error:
        sys.stderr.write(f"semantide operator: {error}\n")
        return 2
    operator.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
