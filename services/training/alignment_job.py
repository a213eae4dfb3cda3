"""The ``align`` job: a generator that is trained already learns what users prefer.

align {dataset, model, reward[, judge][, catalog]} -> {model}   ``config``: fields of AlignConfig, and ``promote``. ``judge`` is a second reward model, of other feedback or
                                                                another seed: it is never optimised, and the guard looks at it. Without it the
                                                                guard knows the held-out test alone, and the result says so. Without ``catalog`` the one that the
                                                                model was trained for is taken. Several ranks share prompts and test users; the first one stores.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from semantide.kernels.device import best_device
from semantide.services.training.aligner import Aligner, AlignState
from semantide.services.training.alignment_recipes import AlignConfig, align_recipe
from semantide.services.training.evaluate import Case, cases_of
from semantide.services.training.grpo import policy_weights
from semantide.services.training.held_out import HeldOut, HeldOutTest, Judged, popularity_percentiles
from semantide.services.training.job_inputs import card_of, promotion_of
from semantide.services.training.policy_terms import PolicyTerms
from semantide.services.training.prompt_share import PromptShare
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.rollout import Prompt, Prompts, RewardSource, Rollouter, checked, noise_of
from semantide.services.training.row_matching import rows_of
from semantide.services.training.trainer import Listener
from semantide.services.training.world import World
from semantide.shared.allocator import peak_memory_bytes
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import ModelTrained
from semantide.shared.dataset import Dataset, Part
from semantide.shared.decoding.sampling import free_beams, spelled_rows
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import BadData, Conflict
from semantide.shared.event_actions import EventActions
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.models.generator import Generator
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.pages import CLICKED_FROM, Pages
from semantide.shared.rollout_scores import QueuedScorer
from semantide.shared.rollouts import Scorer, Scores
from semantide.shared.telemetry import logger

_PROBES, _TOGETHER = 31, 64  # purpose of random numbers; prompts that are probed at a time
_WEIGHTS = "model.safetensors"
_NO_JUDGE = "no independent judge was given: a reward that is gamed is not noticed as such, only a fall of the held-out HR@50 stops the run"
_LEAST_JUDGED = 30  # users; of fewer no change of the judge is beyond noise
_TOKENIZE_AGAIN = "take the data set and the catalog that the model was trained for"

LoadScorer = Callable[[str], Scorer]


@dataclass(frozen=True)
class _World:
    """What an alignment stands on."""

    dataset: Dataset
    catalog: Catalog
    generator: Generator
    trie: SearchTrie
    rows: np.ndarray
    rollouter: Rollouter
    max_items: int
    events: EventActions | None
    pages: Pages | None


def align(job: JobContext, load_scorer: LoadScorer | None = None, ranks: World | None = None, beat: Callable[[], None] = lambda: None) -> JobOutcome:
    """Align the model of the inputs and store it with what the run saw; where nothing that was tested is better, the start comes back as it was.

    ``load_scorer`` reads a reward model into this process; left out, the reward room's. ``ranks`` are the processes that do it together, ``beat`` tells that this one gets on.
    Raises: BadData for a wrong config or inputs, Conflict when model, catalog, reward model and data set do not belong together, JobCancelled.
    """
    changes = dict(job.spec.config)
    promote = promotion_of(changes)
    changes.pop("processes", None)
    config = align_recipe(job.spec.recipe or "grpo-sr", changes)
    share = PromptShare(ranks or World.single(best_device()))
    leads = share.world.leads
    if config.prompts < share.world.size:
        raise BadData(f"a step has {config.prompts} prompts for {share.world.size} processes: give each at least one, or take fewer processes")
    inputs = dict(job.spec.inputs)
    for name in ("dataset", "model", "reward"):
        if name not in inputs:
            raise Conflict(f"an align job needs the input {name!r}: give inputs {{{name!r}: '{name}s/sha256-...'}}")
    _check_judge(job, config, inputs, leads)
    card = card_of(job, inputs["model"])
    if card["model_type"] != "generator":
        raise Conflict(f"the model {inputs['model'][:24]}... is a {card['model_type']}: only a generator can be aligned")
    # What the run stands on; its checkpoints keep what was asked for, as those of earlier versions do.
    resolved = replace(config, clicked_from=config.clicked_from or _clicked_from(card))
    if leads:
        job.configured(resolved)
    world = _world(job, config, card, inputs, share.world.device)
    if config.clicked_from and world.pages is not None and not (world.pages.intensities_S >= config.clicked_from).any():
        raise BadData(
            f"no item on any page has an action of intensity {config.clicked_from} or more, so nothing would be known to be right: lower clicked_from"
        )
    load = load_scorer or (lambda ref: RewardScorer(ref, PreferenceModel.load(job.store.get(ref)), inputs["dataset"], job.store.get(inputs["dataset"])))
    reward = _reward(job, inputs["reward"], load, share)
    judge = load(inputs["judge"]) if "judge" in inputs else None
    counts_N = np.bincount(np.concatenate([np.zeros(0, np.int64), *world.dataset.train_histories()]).astype(np.int64), minlength=len(world.dataset.item_ids))

    def check() -> None:
        beat()
        job.check_cancelled()

    test = _test(job, config, world, counts_N, "valid", reward, judge, share, check)
    popularity_N = np.zeros(len(world.catalog))
    popularity_N[world.rows] = popularity_percentiles(counts_N)
    listener = Listener(time.monotonic, check_cancelled=check, memory_bytes=lambda: peak_memory_bytes(world.generator.head_VD.device))
    if leads:
        listener = replace(listener, progress=job.progress, metric=lambda step, values: job.metric(step, **values))
    terms = PolicyTerms(world.trie, torch.from_numpy(world.generator.vocabulary.item_tokens(world.catalog.codes)).to(world.trie.device), config.temperature)
    aligner = Aligner(
        config,
        world.generator,
        world.rollouter,
        Prompts(world.dataset, resolved, job.spec.seed, world.pages),
        terms,
        reward,
        test,
        listener,
        job.workdir / "checkpoints",
        seed=job.spec.seed,
        popularity_N=popularity_N,
        reward_name=inputs["reward"],
        identity=json.dumps(inputs, sort_keys=True),
        share=share,
    )
    final = _test(job, config, world, counts_N, "test", reward, judge, share, check)
    before = _kept(job, "before", final, share.world)
    state = aligner.run()
    after = final().figures if state.best_step else before
    result = {**_result(config, state, before, after), "judge": inputs.get("judge"), "warnings": _warnings(state)}
    # How much the room took off this run is no part of what came out: a run that was cut off makes the same model.
    scored = share.sums(reward.from_room, reward.scored_here)
    told = {**result, "scored_by_room": int(scored[0]), "scored_here": int(scored[1])}
    if not leads:
        return JobOutcome()
    if not state.best_step:
        job.discard(job.workdir / "checkpoints")
        return JobOutcome({"model": inputs["model"]}, told)
    folder = job.workdir / "model"
    shutil.rmtree(folder, ignore_errors=True)
    world.generator.save_pretrained(folder)
    own = {
        **card,
        "recipe": config.recipe,
        "alignment": asdict(resolved),
        "aligned_from": inputs["model"],
        "reward": inputs["reward"],
        "judge": inputs.get("judge"),
    }
    own["metrics"] = {**card.get("metrics", {}), "alignment": result}
    (folder / "semantide.json").write_text(json.dumps(own, indent=1, sort_keys=True) + "\n")
    (folder / "alignment.json").write_text(json.dumps({"tests": state.tests}) + "\n")
    catalog = inputs.get("catalog") or card["catalog"]
    ref = job.store.put("models", folder, config=asdict(resolved), inputs={**inputs, "catalog": catalog}, seed=job.spec.seed)
    job.send(ModelTrained(job_id=job.id, model=ref, catalog=catalog, promote=False if state.stopped else promote))
    for name in ("checkpoints", "model"):
        job.discard(job.workdir / name)
    return JobOutcome({"model": ref}, told)


def _check_judge(job: JobContext, config: AlignConfig, inputs: dict[str, str], leads: bool) -> None:
    """Refuse a judge that is the reward model itself, or the same network with its signals weighed anew, or that too few users ask; warn where there is none."""
    if "judge" not in inputs:
        if leads:
            logger("job.align").warning(_NO_JUDGE, job=job.id)
        return
    for name in ("probes", "held_out_users"):
        if 0 < (many := getattr(config, name)) < _LEAST_JUDGED:
            raise BadData(
                f"{name} is {many} beside a judge: of so few users no fall of it is beyond noise, and the guard would be blind; give at least {_LEAST_JUDGED}"
            )
    independent = "an independent judge is a reward model of other feedback or another seed; leave it out where there is none"
    if inputs["judge"] == inputs["reward"]:
        raise BadData(f"judge and reward are the same artifact: {independent}")
    # What is not in the store is refused where it is read.
    stored = [job.store.manifest(ref)["files"] if job.store.exists(ref) else {} for ref in (inputs["judge"], inputs["reward"])]
    judge, reward = (files.get(_WEIGHTS, {}).get("sha256") for files in stored)
    if judge is not None and judge == reward:
        raise BadData(f"judge and reward have the same weights, one is the other with its signals weighed anew and shares its faults: {independent}")


def _world(job: JobContext, config: AlignConfig, card: dict[str, Any], inputs: dict[str, str], device: torch.device) -> _World:
    dataset = Dataset.load(job.store.get(inputs["dataset"]))
    catalog_ref = inputs.get("catalog") or card["catalog"]
    catalog = Catalog.load(job.store.get(catalog_ref))
    catalog.check_model(card["tokenizer_digest"], tuple(card["level_sizes"]))
    rows = rows_of(dataset.item_ids, catalog.row_of, f"catalog {catalog_ref[:26]}...", _TOKENIZE_AGAIN)
    generator = Generator.from_pretrained(job.store.get(inputs["model"])).float().to(device)
    trie = SearchTrie.build(catalog.trie, device)
    tokens_NL = generator.vocabulary.item_tokens(catalog.codes)
    try:
        events = EventActions.load(job.store.get(inputs["dataset"]))
    except Conflict:
        events = None  # of a data set that does not say what was done
    try:
        pages = Pages.of(dataset, job.store.get(inputs["dataset"]))
    except Conflict:
        pages = None  # of one that has none, or does not say what its actions mean
    max_items = int(card["max_items"])
    rollouter = Rollouter(generator, trie, tokens_NL, rows, dataset, inputs["dataset"], config, max_items, events)
    return _World(dataset, catalog, generator, trie, rows, rollouter, max_items, events, pages)


def _reward(job: JobContext, ref: str, load_scorer: LoadScorer, share: PromptShare) -> QueuedScorer:
    return QueuedScorer(
        ref,
        "/".join([job.id, *map(str, share.place)]),
        job.store,
        job.broker,
        job.send,
        lambda: load_scorer(ref),
        clock=time.time,
        pause=time.sleep,
        wait_seconds=job.settings.reward_wait_seconds,
    )


def _test(
    job: JobContext,
    config: AlignConfig,
    world: _World,
    counts_N: np.ndarray,
    part: Part,
    reward: RewardSource,
    judge: Scorer | None,
    share: PromptShare,
    check: Callable[[], None],
) -> Callable[[], HeldOut]:
    """The held-out test of one part, the same users and noise each time."""
    events = world.events
    cases = cases_of(world.dataset, part, config.held_out_users, job.spec.seed, None if events is None else events.numbers_E)
    if len(cases) < 2:
        raise BadData(
            f"the data set has {len(cases)} users with something to predict in part {part!r}, too few to tell better from worse: take another split, or more data"
        )

    def tick(done: int, total: int) -> None:
        check()
        if share.world.leads:
            job.progress(done, total, "users", "testing")

    actions = None if events is None else events.among(world.generator.config.merger.actions)
    ranker = GeneratorRanker(world.generator, world.catalog.trie, world.catalog.codes, world.rows, world.max_items, config.beam_width, actions)
    names = (job.spec.inputs["reward"], job.spec.inputs.get("judge", ""))
    probe = Probe(config, world.generator, world.trie, world.rollouter, cases[: config.probes], job.spec.seed, reward, judge, names[0], share, names[1])
    return HeldOutTest(ranker, cases, counts_N, exclude_seen=config.exclude_seen, judge=probe.judged, tick=tick, share=share).run


class Probe:
    """Lets the policy roll out for some held-out users, with the same noise each time, and asks both reward models what that is worth."""

    def __init__(
        self,
        config: AlignConfig,
        generator: Generator,
        trie: SearchTrie,
        rollouter: Rollouter,
        cases: list[Case],
        seed: int,
        reward: RewardSource,
        judge: Scorer | None,
        reward_name: str,
        share: PromptShare | None = None,
        judge_name: str = "",
    ) -> None:
        self._share = share or PromptShare()
        self._config, self._generator, self._trie, self._rollouter, self._seed = config, generator, trie, rollouter, seed
        self._prompts = [Prompt(case.user, len(case.history)) for case in cases]
        self._reward, self._judge, self._name, self._judge_name = reward, judge, reward_name, judge_name

    def judged(self) -> Judged:
        """What each user's rollouts are worth in expectation as the policy is now; known positives count as anything else."""
        told: list[np.ndarray] = [np.zeros((0, 4))]
        own = self._share.own(self._prompts)
        for begin in range(0, len(own), _TOGETHER):
            drawn = self._rollouter.draw(own[begin : begin + _TOGETHER], noise_of(self._seed, _PROBES, begin, self._share.place))
            scores = checked(self._reward.take(self._reward.ask(drawn.rollouts)), drawn.rollouts, self._name)
            present_RG = drawn.rows_RG >= 0
            weights_BG = policy_weights(drawn.log_probs_RGL, present_RG, self._config.beams, self._config.distinct).cpu().numpy()
            rewards_B = self._means(scores, weights_BG)
            codes = free_beams(
                self._rollouter.decoder, self._generator.config.level_sizes, drawn.tokens.values, drawn.tokens.offsets_B1, self._config.beam_width
            )
            told.append(
                np.stack([
                    rewards_B,
                    rewards_B if self._judge is None else self._means(checked(self._judge.score(drawn.rollouts), drawn.rollouts, self._judge_name), weights_BG),
                    ((scores.gate_BG & scores.valid_BG) * weights_BG).sum(1),
                    (spelled_rows(self._trie, codes) < 0).float().mean(1).cpu().numpy(),
                ], 1)
            )  # fmt: skip
        rewards_V, judgements_V, gates_V, invalid_V = self._share.joined(np.concatenate(told)).T
        return Judged(rewards_V.copy(), None if self._judge is None else judgements_V.copy(), float(invalid_V.mean()), float(gates_V.mean()))

    def _means(self, scores: Scores, weights_BG: np.ndarray) -> np.ndarray:
        opened = scores.gate_BG & scores.valid_BG if self._config.gate else scores.valid_BG
        return np.asarray((np.where(opened, scores.preference_BG, 0.0) * weights_BG).sum(1), dtype=np.float64)


def _kept(job: JobContext, name: str, test: Callable[[], HeldOut], world: World) -> dict[str, float]:
    """The figures of a test that was made before the run was cut off, or made now."""
    path = job.workdir / f"{name}.json"
    text: str | None = world.gather_json(path.read_text() if path.exists() else None)[0]
    if text is None:
        text = json.dumps(test().figures)
        if world.leads:
            aside = path.with_suffix(".incoming")
            aside.write_text(text)
            aside.replace(path)
    figures: dict[str, float] = json.loads(text)
    return figures


def _clicked_from(card: dict[str, Any]) -> float:
    """From which intensity on the model's training took what is on a page for clicked."""
    pages = (card.get("config") or {}).get("pages") or {}
    return float(pages.get("clicked_from", CLICKED_FROM))


def _warnings(state: AlignState) -> list[str]:
    """What the guard could not see."""
    judged = state.start["judge_V"]
    if judged is None:
        return [_NO_JUDGE]
    return [f"the judge was asked for {len(judged)} users, all that are held out: a fall of it is hardly ever beyond noise"] * (len(judged) < _LEAST_JUDGED)


def _result(config: AlignConfig, state: AlignState, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    return {
        "steps": state.step,
        "kept_step": state.best_step,
        "stopped": state.stopped,
        "valid_before": state.tests[0],
        "valid_after": next(row for row in state.tests if row["step"] == state.best_step),
        "test_before": before,
        "test_after": after,
        "policy": state.policy,
        "skipped_groups": state.skipped,
        "exclude_seen": config.exclude_seen,
        "beam_width": config.beam_width,
    }
