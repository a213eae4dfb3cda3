"""What artifacts are made of: the references that stand in their manifests and cards, followed as far as they lead."""

from __future__ import annotations

import re
from collections.abc import Iterable

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.errors import Corrupt, NotFound

_REFERENCE = re.compile(r"(?<![a-z])[a-z]+/sha256-[0-9a-f]{64}(?![0-9a-f])")
_CARD_BYTES = 8 * 1024 * 1024  # a JSON file beyond that is no card


def references_in(text: str) -> set[str]:
    """Every reference that stands somewhere in a text."""
    return set(_REFERENCE.findall(text))


class Lineage:
    """Reads each artifact of a store once."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._parents: dict[str, frozenset[str]] = {}

    def parents(self, ref: str) -> frozenset[str]:
        """What an artifact was made of or stands on; of one that is not there, nothing. A catalog has all items of the one that it extends, and does not stand on that."""
        if (known := self._parents.get(ref)) is None:
            try:
                known = self._read(ref)
            except (NotFound, Corrupt, FileNotFoundError):
                return frozenset()
            self._parents[ref] = known
        return known

    def _read(self, ref: str) -> frozenset[str]:
        manifest = self._store.manifest(ref)
        cards = [name for name, entry in manifest["files"].items() if name.endswith(".json") and entry["bytes"] <= _CARD_BYTES]
        texts = [str({"config": manifest["config"], "inputs": manifest["inputs"]}), *(self._store.text(ref, name) for name in cards)]
        kind = ref.partition("/")[0]
        found = set().union(*map(references_in, texts)) - {ref}
        return frozenset(each for each in found if not (kind == "catalogs" == each.partition("/")[0]))

    def closure(self, refs: Iterable[str]) -> set[str]:
        """These artifacts, with what they were made of, and so on."""
        found: set[str] = set()
        waiting = list(refs)
        while waiting:
            ref = waiting.pop()
            if ref not in found:
                found.add(ref)
                waiting += self.parents(ref)
        return found

    def chain(self, catalog: str) -> list[str]:
        """A catalog and those that it extends, back to the one that began it or the last that is still there."""
        found: list[str] = []
        at: str | None = catalog
        while at is not None and at not in found:
            found.append(at)
            try:
                at = self._store.manifest(at)["config"].get("extends")
            except NotFound:
                at = None
        return found
