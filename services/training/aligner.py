"""The loop of an alignment: draw, score, learn, test, and stop and go back when the guard says so.

A resumed run computes bit for bit what the uninterrupted one would have: prompts, noise and dropout are functions of seed and step, and weights, optimiser, average, best
weights and rollouts that were drawn ahead are part of every checkpoint. Several ranks share the prompts of a step (``prompt_share``) and make one update together.
Legend: R prompts, G rollouts of a prompt, L levels, C items (rollouts and positives), D known positives.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semantide.services.training import run_config
from semantide.services.training.alignment_guard import Guard, Standing
from semantide.services.training.alignment_recipes import AlignConfig
from semantide.services.training.checkpoint import Checkpoints
from semantide.services.training.gradients import GradientSum
from semantide.services.training.grpo import (
    group_advantages,
    group_moments,
    mean_over_rollouts,
    policy_loss,
    policy_mean,
    policy_weights,
    prefix_advantages,
    shaped_rewards,
)
from semantide.services.training.held_out import HeldOut
from semantide.services.training.optimiser import rate_share, set_rate
from semantide.services.training.policy_terms import Items, Places, PolicyTerms, Terms, divergence_CL
from semantide.services.training.prompt_share import PromptShare
from semantide.services.training.rollout import Drawn, Prompts, RewardSource, Rollouter, checked, noise_of
from semantide.services.training.run_weights import RunWeights
from semantide.services.training.trainer import Listener
from semantide.shared.decoding.sampling import Groups
from semantide.shared.errors import Conflict, JobCancelled, PermanentError, RankLost, SemantideError
from semantide.shared.models.generator import Generator

_DRAWS, _DROPOUT = 21, 22  # purposes of random numbers
_TOLD = ("reward", "reward_spread", "preference", "gate_rate", "known_rate", "kl", "entropy", "diversity", "popularity", "staleness")  # of what comes out


@dataclass
class AlignState:
    """Where a run stands and what it has seen; together with the tensors this is the run."""

    step: int = 0
    tests: list[dict[str, float]] = field(default_factory=list)
    start: dict[str, list[float] | None] = field(default_factory=dict)
    """Each user's result before the first step."""
    best: float = -math.inf
    best_step: int = 0
    skipped: int = 0
    """Groups without a spread of rewards, of all steps."""
    constant: int = 0
    """Steps in a row without any group that had one."""
    policy: dict[str, dict[str, float]] = field(default_factory=dict)
    """What rollouts were worth and how far the policy had gone, at the first and at the last step that was told."""
    stopped: str = ""
    """Why the guard ended the run; empty while it goes on."""
    finished: bool = False


@dataclass(frozen=True)
class _Whole:
    """What ``RunWeights`` keeps."""

    model: nn.Module
    tables: Mapping[str, Any]


@dataclass(frozen=True)
class _Parts:
    """What this rank has of all ranks' used groups, groups with any rollout, rollouts and known positives, in shares: each is what a mean of the loss goes over."""

    used: float
    groups: float
    rollouts: float
    positives: float


class Aligner:
    """Aligns one generator; its best tested weights are in the model when ``run`` returns, those of the start among them."""

    def __init__(
        self,
        config: AlignConfig,
        generator: Generator,
        rollouter: Rollouter,
        prompts: Prompts,
        terms: PolicyTerms,
        reward: RewardSource,
        test: Callable[[], HeldOut],
        listener: Listener,
        checkpoints: Path,
        *,
        seed: int,
        popularity_N: np.ndarray,
        reward_name: str = "",
        identity: str = "",
        checkpoint_seconds: float = 20.0,
        share: PromptShare | None = None,
    ) -> None:
        """``popularity_N`` is each catalog row's popularity percentile; ``share`` this rank's of a run of several."""
        self.config, self.state = config, AlignState()
        self._generator, self._rollouter, self._prompts, self._terms, self._reward, self._test = generator, rollouter, prompts, terms, reward, test
        self._listener, self._seed, self._reward_name, self._identity, self._checkpoint_seconds = listener, seed, reward_name, identity, checkpoint_seconds
        self._device = generator.head_VD.device
        self._start = copy.deepcopy(generator).eval().requires_grad_(False)
        self._weights = RunWeights(_Whole(generator, {}), config.training)
        self._share = share or PromptShare()
        self._gradients = GradientSum(self._share.world, self._weights.parameters)
        self._checkpoints = Checkpoints(checkpoints, self._share.world)
        self._guard = Guard(config.guard_deviations, config.guard_loss)
        self._popularity_N = torch.from_numpy(popularity_N).to(self._device)
        self._ahead: deque[tuple[int, Drawn, Any]] = deque()
        self._saved_at = 0.0

    def run(self) -> AlignState:
        """Align until the steps are over or the guard ends it.

        Raises: JobCancelled, PermanentError for rewards or losses that are no numbers or never differ, Conflict when the checkpoints are another run's.
        """
        try:
            return self._run()
        except RankLost:
            raise  # a checkpoint that is being written waits for the rank that is gone
        except Exception:
            # What is being written is the last good one: this run's own end must not cut it off.
            with suppress(SemantideError):
                self._checkpoints.wait()
            raise

    def _run(self) -> AlignState:
        state, config, listener = self._restored(), self.config, self._listener
        self._saved_at = listener.clock()
        if not state.tests:
            self._tested()
        while not state.finished:
            cancelled = self._cancelled()
            if self._share.agreed(cancelled is not None):
                self._save()
                self._checkpoints.wait()
                raise cancelled or JobCancelled("another rank was asked to stop")
            began = listener.clock()
            figures = self._stepped()
            state.step += 1
            state.finished = state.step >= config.steps
            if state.step % config.log_every == 0 or state.finished:
                listener.metric(state.step, figures | {"seconds": listener.clock() - began})
                told = {name: figures[name] for name in _TOLD if name in figures}
                state.policy = {"first": state.policy.get("first", told), "last": told}
            listener.progress(state.step, config.steps, "steps", "aligning")
            if state.finished or state.step % config.evaluate_every == 0:
                self._tested()
            if self._share.agreed(state.finished or (self._share.world.leads and listener.clock() - self._saved_at >= self._checkpoint_seconds)):
                self._save()
        self._checkpoints.wait()
        self._weights.take_best()
        self._generator.eval()
        return state

    def _cancelled(self) -> JobCancelled | None:
        try:
            self._listener.check_cancelled()
        except JobCancelled as error:
            return error
        return None

    def _stepped(self) -> dict[str, float]:
        """One step: what was drawn ``staleness`` steps ago is scored and learned from."""
        state, config = self.state, self.config
        while len(self._ahead) <= config.staleness and (step := state.step + len(self._ahead)) < config.steps:
            drawn = self._rollouter.draw(self._share.own(self._prompts.at(step)), noise_of(self._seed, _DRAWS, step, self._share.place))
            self._ahead.append((state.step, drawn, self._reward.ask(drawn.rollouts)))
        drawn_at, drawn, asked = self._ahead.popleft()
        scores = checked(self._reward.take(asked), drawn.rollouts, self._reward_name)
        positives = self._rollouter.positives(drawn.prompts)
        known_RG = _members(drawn.rows_RG, positives)
        present_RG = drawn.rows_RG >= 0
        preference_RG = torch.from_numpy(scores.preference_BG).to(self._device).masked_fill(~present_RG, 0.0)
        gate_RG = torch.from_numpy(scores.gate_BG & scores.valid_BG if config.gate else scores.valid_BG).to(self._device)
        rewards_RG = shaped_rewards(preference_RG, gate_RG, known_RG, config.positive_reward)
        codes_RGL = self._codes(drawn.rows_RG)
        compared = {"least_spread": config.least_spread, "divide": config.spread == "group"}
        if config.baseline == "prefix":
            advantages = prefix_advantages(rewards_RG, present_RG, codes_RGL, **compared)  # type: ignore[arg-type]
        else:
            advantages = group_advantages(rewards_RG, present_RG, codes_RGL.shape[2], **compared)  # type: ignore[arg-type]
        weights_RG = policy_weights(drawn.log_probs_RGL, present_RG, config.beams, config.distinct)
        counts = [int(each.sum()) for each in (advantages.used_B, weights_RG.sum(1) > 0, present_RG)] + [sum(map(len, positives)), len(drawn.prompts)]
        totals = self._share.sums(*counts)
        used, groups = totals[0], totals[-1]
        state.skipped += int(groups - used)
        state.constant = 0 if used else state.constant + 1
        if state.constant >= config.constant_steps:
            raise PermanentError(
                f"for {state.constant} steps the rewards of no group differed by more than {config.least_spread} (mean {float(rewards_RG[present_RG].mean()):.4g}, gate open for "
                f"{float(gate_RG[present_RG].float().mean()):.0%}): the reward model {self._reward_name[:26]}... tells these items not apart; train it on more feedback, or lower "
                "least_spread"
            )
        _, spread_R1 = group_moments(rewards_RG, present_RG)
        told = {
            "reward": rewards_RG,
            "preference": preference_RG,
            "gate_rate": gate_RG,
            "known_rate": known_RG,
            "popularity": self._popularity_N[drawn.rows_RG],
        }
        figures = {
            **{name: float(policy_mean(values, weights_RG)) for name, values in told.items()}, "reward_spread": float(spread_R1.mean()),
            "skipped_share": 1 - used / groups,
            "diversity": len(torch.unique(drawn.rows_RG[present_RG])) / max(1, min(int(present_RG.sum()), len(self._popularity_N))),
            "group_diversity": _distinct(drawn.rows_RG),
        }  # fmt: skip
        items, order_C, num_positives = _items(drawn.rows_RG, positives)
        places = self._terms.places(self._generator, drawn.tokens, items, drawn.rules)
        figures["tokens"] = float((drawn.tokens.values.numel() + items.rows_C.numel() * codes_RGL.shape[2]) * config.updates)
        start = None
        if config.kl_weight or (state.step + 1) % config.log_every == 0:
            with torch.no_grad():
                start = self._terms.of(self._start, places)
        parts = _Parts(*(own / max(total, 1) for own, total in zip(counts[:4], totals[:4], strict=True)))
        for update in range(config.updates):
            stale = update > 0 or state.step > drawn_at
            figures |= self._updated(drawn, places, order_C, num_positives, present_RG, weights_RG, advantages, stale, update, start, parts)
            figures["staleness"] = float((state.step - drawn_at) * config.updates + update)
        return self._share.mean(figures, len(drawn.prompts))

    def _updated(
        self,
        drawn: Drawn,
        places: Places,
        order_C: Tensor,
        num_positives: int,
        present_RG: Tensor,
        weights_RG: Tensor,
        advantages: Any,
        stale: bool,
        update: int,
        start: Terms | None,
        parts: _Parts,
    ) -> dict[str, float]:
        """One update; the figures of the loss. Of every mean in it this rank has a part, and gradients are summed."""
        state, config, generator = self.state, self.config, self._generator
        rate = rate_share(config.training, state.step, state.step / config.steps)
        for optimiser in self._weights.optimisers:
            set_rate(optimiser, rate)
            optimiser.zero_grad(set_to_none=True)
        torch.manual_seed(int(np.random.SeedSequence([self._seed, _DROPOUT, state.step, update, *self._share.place]).generate_state(1)[0]))
        generator.train(config.dropout)
        terms = self._terms.of(generator, places)
        many = drawn.rows_RG.numel()
        shape = (*drawn.rows_RG.shape, -1)

        def of_rollouts(values_CL: Tensor) -> Tensor:
            return values_CL[order_C[:many]].view(shape)

        own_RGL = of_rollouts(terms.policy_CL)
        by_weight = weights_RG if config.weighing == "policy" else None
        loss, held = policy_loss(own_RGL, drawn.log_probs_RGL if stale else None, advantages, present_RG, config.clip, by_weight)
        entropy, open_share = policy_mean(of_rollouts(terms.entropy_CL).sum(2), weights_RG), mean_over_rollouts(of_rollouts(terms.valid_CL), present_RG)
        figures = {
            "policy_loss": float(loss.detach()),
            "entropy": float(entropy.detach()),
            "valid_log_share": float(open_share.detach()),
            "lr": config.learning_rate * rate,
        }
        loss = loss * parts.used
        if config.clip:
            figures["clipped_share"] = float(held)
        if start is not None:
            kl = policy_mean(of_rollouts(divergence_CL(terms, start)).sum(2), weights_RG)
            figures["kl"] = float(kl.detach())
            if config.kl_weight:
                loss = loss + config.kl_weight * parts.groups * kl
        if num_positives:
            supervised = -terms.row_CL[order_C[many:]].sum(1).mean()
            figures["supervised_loss"] = float(supervised.detach())
            if config.supervised_weight:
                loss = loss + config.supervised_weight * parts.positives * supervised
        if config.validity_weight:
            loss = loss - config.validity_weight * parts.rollouts * open_share
        self._gradients.begin()
        loss.backward()
        self._gradients.finish()
        norm = float(nn.utils.clip_grad_norm_(self._weights.parameters, config.clip_norm, foreach=True))
        (value,) = self._share.sums(float(loss.detach()))
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise PermanentError(
                f"at step {state.step} the loss is {value} and the gradient's norm {norm}: lower learning_rate (now {config.learning_rate}), or set clip where staleness or "
                f"updates is above its default; the last good checkpoint stays in {self._checkpoints.folder}"
            )
        for optimiser in self._weights.optimisers:
            optimiser.step()
        self._weights.average(state.step * config.updates + update)
        generator.eval()
        return figures | {"loss": value, "gradient_norm": norm}

    def _tested(self) -> None:
        """Test, let the guard decide, and keep the weights where they are the best so far."""
        state, config = self.state, self.config
        with self._weights.averaged():
            self._generator.eval()
            result = self._test()
            better = result.figures["hr@50"] + 1e-3 * result.figures["ndcg@50"]
            if not state.tests:
                state.start = {name: None if value is None else value.tolist() for name, value in vars(result.standing).items()}
            verdict = self._guard.verdict(_standing(state.start), result.standing)
            if better > state.best and not verdict.stops:
                state.best, state.best_step = better, state.step
                self._weights.keep()
        changes = {
            "hr@50_change": verdict.hits.value,
            "hr@50_error": verdict.hits.error,
            "reward_change": verdict.reward.value,
            "reward_error": verdict.reward.error,
        }
        if verdict.judge is not None:
            changes |= {"judge_change": verdict.judge.value, "judge_error": verdict.judge.error}
        row = {"step": float(state.step), **result.figures, **(changes if state.tests else {})}
        state.tests.append(row)
        self._listener.metric(state.step, {f"held_out_{name}": value for name, value in row.items() if name != "step"})
        if verdict.stops:
            state.stopped, state.finished = f"step {state.step}: {verdict.reason}", True
        elif state.step >= config.steps:
            state.finished = True

    def _codes(self, rows_RG: Tensor) -> Tensor:
        return self._terms.tokens_NL[rows_RG.clamp_min(0)]

    def _save(self) -> None:
        own: dict[str, Tensor] = {}
        for place, (drawn_at, drawn, _) in enumerate(self._ahead):
            own |= {f"ahead.{place}.rows": drawn.rows_RG, f"ahead.{place}.log_probs": drawn.log_probs_RGL, f"ahead.{place}.drawn_at": torch.tensor(drawn_at)}
        state = {"run": asdict(self.state), "config": run_config.plain(self.config), "identity": self._identity, "seed": self._seed}
        self._checkpoints.save(self.state.step, self._weights.tensors(), state, own=own)
        self._saved_at = self._listener.clock()

    def _restored(self) -> AlignState:
        found = self._checkpoints.latest()
        if found is None:
            self._weights.begin_average()
            return self.state
        saved = found.state
        if not run_config.same(saved["config"], self.config) or saved["identity"] != self._identity or saved["seed"] != self._seed:
            raise Conflict(
                f"the checkpoints in {self._checkpoints.folder} are of a run with another configuration, input or seed: give each run a folder of its own"
            )
        self.state = AlignState(**saved["run"])
        self._weights.restore(found.tensors)
        for place in range(sum(name.endswith(".rows") for name in found.own)):
            rows_RG, log_probs_RGL, drawn_at = (found.own[f"ahead.{place}.{name}"].to(self._device) for name in ("rows", "log_probs", "drawn_at"))
            groups = Groups(rows_RG, log_probs_RGL)
            drawn = self._rollouter.drawn(self._share.own(self._prompts.at(self.state.step + place)), groups)
            self._ahead.append((int(drawn_at), drawn, self._reward.ask(drawn.rollouts)))
        return self.state


def _standing(kept: Mapping[str, list[float] | None]) -> Standing:
    arrays = {name: None if values is None else np.array(values, dtype=np.float64) for name, values in kept.items()}
    hits_U, reward_V = arrays["hits_U"], arrays["reward_V"]
    assert hits_U is not None and reward_V is not None
    return Standing(hits_U, reward_V, arrays["judge_V"])


def _members(rows_RG: Tensor, positives: list[np.ndarray]) -> Tensor:
    """Which rollouts are known positives of their prompt."""
    known = np.stack([np.isin(rows, own) for rows, own in zip(rows_RG.cpu().numpy(), positives, strict=True)])
    return torch.from_numpy(known).to(rows_RG.device)


def _items(rows_RG: Tensor, positives: list[np.ndarray]) -> tuple[Items, Tensor, int]:
    """Rollouts and positives in the order of their prompts; where each of them, rollouts first, went; and how many positives there are."""
    device, group = rows_RG.device, rows_RG.shape[1]
    lengths = [len(rows) for rows in positives]
    rows_C = torch.cat([rows_RG.flatten().clamp_min(0), torch.from_numpy(np.concatenate(positives)).to(device)])
    prompts_C = torch.cat([torch.arange(len(rows_RG)).repeat_interleave(group), torch.arange(len(rows_RG)).repeat_interleave(torch.tensor(lengths))]).to(device)
    sorted_C, from_C = prompts_C.sort(stable=True)
    order_C = torch.empty_like(from_C)
    order_C[from_C] = torch.arange(len(from_C), device=device)
    return Items(rows_C[from_C], sorted_C), order_C, sum(lengths)


def _distinct(rows_RG: Tensor) -> float:
    """Share of a group's rollouts that are not in it already, on average."""
    shares = [len(set(own)) / max(1, len(own)) for own in ([row for row in rows if row >= 0] for rows in rows_RG.tolist())]
    return sum(shares) / max(1, len(shares))
