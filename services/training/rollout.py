"""Rollouts of an alignment: which prompts a step has, what the policy draws for them, and what the reward model says.

A step's prompts and its noise are functions of seed and step, so a run that goes on from a checkpoint draws what it would have drawn.
Legend: P places of all training histories, S their known positives, R prompts of a step, G rollouts of a prompt, L levels, N items of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semantide.services.training.alignment_recipes import AlignConfig
from semantide.services.training.row_matching import inverse
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.sampling import Groups, Sampling, sample_groups
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.errors import BadData, PermanentError
from semantide.shared.event_actions import EventActions
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.prompt_cache import history_window
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.pages import CLICKED_FROM, Pages
from semantide.shared.rollouts import Rollouts, Scorer, Scores, rollouts_of

IntArray = npt.NDArray[np.int64]


class RewardSource(Protocol):
    """A scorer that may be asked ahead of time, such as ``QueuedScorer``."""

    def ask(self, rollouts: Rollouts) -> Any:
        """Put rollouts on their way."""
        ...

    def take(self, asked: Any) -> Scores:
        """Their scores; waits until they are there."""
        ...


class ScoredHere:
    """A scorer of this process, which is asked when its answer is taken."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def ask(self, rollouts: Rollouts) -> Rollouts:
        """See ``RewardSource``."""
        return rollouts

    def take(self, asked: Rollouts) -> Scores:
        """See ``RewardSource``."""
        return self._scorer.score(asked)


@dataclass(frozen=True)
class Prompt:
    """One history as a rollout begins after it; ``end`` is how many of the user's events it has, ``known`` the data set's rows of its known positives."""

    user: int
    end: int
    known: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Places:
    """Where rollouts may begin. Shapes: ``users_P``, ``ends_P``; ``offsets_P1`` where each place's positives begin in ``known_S``."""

    users_P: IntArray
    ends_P: IntArray
    offsets_P1: IntArray
    known_S: IntArray

    @classmethod
    def of_pages(cls, dataset: Dataset, pages: Pages, most: int, clicked_from: float) -> _Places:
        """Before each page of the training part that has a positive; of these the strongest ``most``, the first shown where equals are too many."""
        kept, before_P = pages.training(dataset)
        page_S = np.repeat(np.arange(len(kept)), np.diff(kept.offsets_P1))
        order = np.lexsort((-kept.intensities_S, page_S))
        order = order[(kept.intensities_S[order] >= clicked_from) & (before_P[page_S[order]] > 0)]
        page_S, items_S = page_S[order], kept.items_S[order]
        places, first, page_of = np.unique(page_S, return_index=True, return_inverse=True)
        taken = np.arange(len(page_S)) - first[page_of] < most
        offsets = np.concatenate([[0], np.cumsum(np.bincount(page_of[taken], minlength=len(places)))])
        return cls(kept.users_P[places], before_P[places], offsets.astype(np.int64), items_S[taken])

    @classmethod
    def of_events(cls, dataset: Dataset, many: int) -> _Places:
        """Before each training event but a user's first; ``many`` of the next ones are known."""
        lengths = np.maximum(dataset.train_end.astype(np.int64) - 1, 0)
        users = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.arange(len(users)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 1
        known = np.minimum(many, dataset.train_end[users] - ends)
        offsets = np.concatenate([[0], np.cumsum(known)]).astype(np.int64)
        events = np.arange(offsets[-1]) + np.repeat(dataset.offsets[users] + ends - offsets[:-1], known)
        return cls(users, ends, offsets, dataset.items[events].astype(np.int64))


class Prompts:
    """Places of training histories, an epoch of them in a drawn order, then the next.

    With pages a place is that before one of them, and what was ordered or clicked on it is known to be right; without, that before any event, and the next ones are.
    """

    def __init__(self, dataset: Dataset, config: AlignConfig, seed: int, pages: Pages | None = None) -> None:
        """Raises: BadData for a data set without two training events of any user."""
        self._places = _Places.of_events(dataset, config.positives)
        if pages is not None and config.page_positives:
            of_pages = _Places.of_pages(dataset, pages, config.page_positives, config.clicked_from or CLICKED_FROM)
            # Where everything came on one page of its user, there is no history before any.
            self._places = of_pages if len(of_pages.users_P) else self._places
        if not len(self):
            raise BadData("no user of the data set has two training events, so nothing is known to come after any history: import more data")
        self._many, self._seed = config.prompts, seed
        self._order = lru_cache(maxsize=2)(self._drawn)

    def __len__(self) -> int:
        return len(self._places.users_P)

    def at(self, step: int) -> list[Prompt]:
        """The prompts of a step."""
        numbers = step * self._many + np.arange(self._many)
        return [self._prompt(int(self._order(int(number) // len(self))[int(number) % len(self)])) for number in numbers]

    def _prompt(self, place: int) -> Prompt:
        places = self._places
        known = places.known_S[places.offsets_P1[place] : places.offsets_P1[place + 1]]
        return Prompt(int(places.users_P[place]), int(places.ends_P[place]), tuple(known.tolist()))

    def _drawn(self, epoch: int) -> IntArray:
        return np.random.default_rng([self._seed, 11, epoch]).permutation(len(self))


@dataclass(frozen=True)
class Drawn:
    """The rollouts of some prompts: what the policy drew, and what the reward model was or will be asked.

    Shapes: ``rows_RG`` catalog rows, -1 for none; ``log_probs_RGL`` of the policy that drew; ``tokens`` the prompts as it read them.
    """

    prompts: Sequence[Prompt]
    tokens: Jagged
    rules: ItemFilter | None
    rows_RG: Tensor
    log_probs_RGL: Tensor
    rollouts: Rollouts


class Rollouter:
    """Draws groups with the decoding engine that serves, from the generator as it is at that moment."""

    def __init__(
        self,
        generator: Generator,
        trie: SearchTrie,
        item_tokens_NL: IntArray,
        catalog_rows: IntArray,
        dataset: Dataset,
        dataset_ref: str,
        config: AlignConfig,
        max_items: int,
        events: EventActions | None = None,
    ) -> None:
        """``item_tokens_NL`` and ``trie`` are the catalog's; ``catalog_rows`` [N] gives the catalog's row of each item of the data set, ``max_items`` the longest
        history that the generator reads."""
        self.decoder, self._trie, self._dataset, self._ref = GeneratorDecoder(generator), trie, dataset, dataset_ref
        self._generator, self._config, self._max_items, self._events = generator, config, max_items, events
        self._spelling, self._catalog_rows = PromptSpelling(generator.vocabulary, generator.config.merger, item_tokens_NL), catalog_rows
        self._actions = None if events is None else events.among(generator.config.merger.actions)
        self._item_of = inverse(catalog_rows, len(trie))
        self._mask = trie.prefix_counts(self._item_of >= 0)
        self._everything = bool((self._item_of >= 0).all())

    def draw(self, prompts: Sequence[Prompt], noise: torch.Generator, sampling: Sampling | None = None) -> Drawn:
        """Groups for some prompts."""
        tokens, rules = self.tokens(prompts), self.rules(prompts)
        training = self._generator.training
        self._generator.eval()
        groups = sample_groups(self.decoder, self._trie, tokens.values, tokens.offsets_B1, sampling or self._config.sampling, noise, node_filter=rules)
        self._generator.train(training)
        return self.drawn(prompts, groups)

    def drawn(self, prompts: Sequence[Prompt], groups: Groups) -> Drawn:
        """What was drawn for some prompts, now or by an earlier process."""
        rows_RG = groups.rows_RG.clone()
        own = rows_RG.cpu().numpy()
        items_RG = np.where(own >= 0, self._item_of[own], -1)
        return Drawn(prompts, self.tokens(prompts), self.rules(prompts), rows_RG, groups.log_probs_RGL.clone(), self._packed(prompts, items_RG))

    def tokens(self, prompts: Sequence[Prompt]) -> Jagged:
        """The prompts as the generator reads them."""
        return Jagged.from_sequences(map(self._spelled, prompts)).to(self._trie.device)

    def _spelled(self, prompt: Prompt) -> IntArray:
        window = history_window(self._catalog_rows[self._history(prompt)], self._max_items)
        last = int(self._dataset.offsets[prompt.user]) + prompt.end
        read = slice(last - len(window), last)
        actions = None if self._events is None or self._actions is None else self._actions[self._events.numbers_E[read]]
        return self._spelling.prompt(window, actions, self._dataset.times[read] // 1000)

    def rules(self, prompts: Sequence[Prompt]) -> ItemFilter | None:
        """What the policy must not draw: items that the data set does not have, and with ``exclude_seen`` those of the history."""
        if not self._config.exclude_seen and self._everything:
            return None
        seen: list[IntArray | list[int]] = [self._catalog_rows[self._history(prompt)] if self._config.exclude_seen else [] for prompt in prompts]
        return ItemFilter.build(self._trie, [self._mask], [0] * len(prompts), seen)

    def positives(self, prompts: Sequence[Prompt]) -> list[IntArray]:
        """Catalog rows of what is known to be right, each once."""
        return [np.unique(self._catalog_rows[np.array(prompt.known, dtype=np.int64)]) for prompt in prompts]

    def _history(self, prompt: Prompt) -> npt.NDArray[np.int32]:
        return self._dataset.history(prompt.user)[: prompt.end]

    def _packed(self, prompts: Sequence[Prompt], items_RG: IntArray) -> Rollouts:
        longest, histories, times, actions = self._config.history_events, [], [], []
        for prompt in prompts:
            first = int(self._dataset.offsets[prompt.user]) + max(0, prompt.end - longest)
            span = slice(first, int(self._dataset.offsets[prompt.user]) + prompt.end)
            histories.append(self._dataset.items[span].astype(np.int64))
            times.append(self._dataset.times[span])
            if self._events is not None:
                actions.append(self._events.numbers_E[span].astype(np.int64))
        names = () if self._events is None else self._events.names
        return rollouts_of(self._ref, [prompt.user for prompt in prompts], histories, times, items_RG, actions, names)


def checked(scores: Scores, rollouts: Rollouts, reward: str) -> Scores:
    """Scores that can be learned from.

    Raises: PermanentError for numbers that are none, or outside [0, 1].
    """
    preference, present = scores.preference_BG, rollouts.items_BG >= 0
    if preference.shape != rollouts.items_BG.shape:
        raise PermanentError(f"the reward model {reward[:26]}... scored {preference.shape} rollouts of {rollouts.items_BG.shape}: train it anew")
    wrong = present & ~((preference >= 0) & (preference <= 1))
    if wrong.any():
        examples = ", ".join(f"{value:g}" for value in preference[wrong][:3])
        raise PermanentError(
            f"the reward model {reward[:26]}... gave {int(wrong.sum())} of {int(present.sum())} rollouts a preference outside [0, 1] ({examples}): train it anew, or "
            "name another with the input `reward` (or `judge`, where it was that)"
        )
    return scores


def noise_of(seed: int, purpose: int, step: int, place: Sequence[int] = ()) -> torch.Generator:
    """Random numbers of one step and purpose, and of one ``place`` among ranks that share it."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, purpose, step, *place]).generate_state(1, np.uint64)[0] >> np.uint64(1)))
