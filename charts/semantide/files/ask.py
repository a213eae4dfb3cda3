"""Asks one API of the release for a recommendation, as `helm test` runs it: the address is the argument, the key is in the environment."""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

ADDRESS = sys.argv[1]
# Of KEY, ROLE:KEY and NAME@ROLE:KEY: whoever may do anything may ask.
KEY = re.sub(r"^(?:[A-Za-z0-9._-]+@)?(?:read|write|admin):", "", os.environ["SEMANTIDE_API_KEYS"].split(",")[0].strip())


def call(path, body=None, patience=60.0):
    """One request; whoever is not ready yet is asked again for a while."""
    deadline = time.monotonic() + patience
    while True:
        request = urllib.request.Request(ADDRESS + path, headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, None if body is None else json.dumps(body).encode(), timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            problem = f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}"
            if error.code != 503:
                sys.exit(problem)
        except OSError as error:
            problem = f"{path} does not answer: {error}"
        if time.monotonic() > deadline:
            sys.exit(problem)
        time.sleep(1)


call("/readyz")
live = call("/v1/serving/live")
if not (live.get("model") or live.get("retriever")):
    sys.stdout.write("ready; no model is live yet, so there is nothing to recommend: train and promote one, then run `helm test` again\n")
    sys.exit()
answer = call("/v1/recommendations", {"user": "helm-test", "n": 3})
if not answer["items"]:
    sys.exit(f"{live.get('model')} is live and recommended nothing: {answer.get('short_reason')}")
sys.stdout.write(f"{live.get('model')} recommends {', '.join(str(item['item']) for item in answer['items'])}\n")
