"""Full training configurations by name; a job's ``config`` may override single numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from semantide.services.training.page_targets import Form, PagesConfig
from semantide.shared.models.generator import GeneratorConfig
from semantide.shared.models.item_rows import TableGrowth
from semantide.shared.models.item_table import TableOptimiser
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.retriever import RetrieverConfig
from semantide.shared.models.sasrec import SASRecConfig

C = TypeVar("C")


@dataclass(frozen=True)
class NegativesConfig:
    """Retriever: what its targets are compared with beside ``num_negatives``, and how."""

    in_batch: bool = False
    """Whether the targets of a batch are negatives of all of it."""
    prefix: int = 0
    """Hard negatives of each target, whose semantic ids begin like its own; takes the input ``catalog``."""
    prefix_levels: int = 1
    """How many first codes they have in common."""
    beams: int = 0
    """Hard negatives of each target from a generator's beams or a retriever's best items; takes the input ``beams``, which a negatives job makes."""
    expansion: int = 1
    """A target takes the negatives of this many targets, its own among them; nothing more is looked up."""
    sharing: Literal["vectors", "logits"] = "vectors"
    """Whether others' negatives are scored anew with the target's own state, or the others' logits are taken as they are."""
    precision: Literal["float32", "float16", "int8"] = "float32"
    """Of negatives' vectors; products are summed in float32."""
    ahead: bool = False
    """Whether the negatives room draws each target's own negatives while training computes; what they are does not depend on it."""

    def __post_init__(self) -> None:
        for name, low, high in (("prefix", 0, 65536), ("prefix_levels", 1, 64), ("beams", 0, 4096), ("expansion", 1, 64)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"negatives.{name} is {getattr(self, name)}: give a number from {low} to {high}")
        for name, choices in (("sharing", ("vectors", "logits")), ("precision", ("float32", "float16", "int8"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"negatives.{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a training run computes. Only the numbers of the chosen ``model_type`` count."""

    recipe: str
    model_type: Literal["generator", "sasrec", "retriever"] = "generator"
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    sasrec: SASRecConfig = field(default_factory=SASRecConfig)
    retriever: RetrieverConfig = field(default_factory=RetrieverConfig)

    checkpoint: str = ""
    """What training goes on from. Generator: a folder with a Qwen2.5 or Qwen3 checkpoint below the import roots, or a stored model (models/...); its shape counts in
    place of ``generator``'s. Retriever: a stored one of the same shape; items that it knows begin at their vectors. Empty: layers begin at random."""
    keep_text: bool = False
    """Whether a checkpoint's own tokens stay in the vocabulary before the codes. They cost memory and are never asked for."""
    max_items: int = 50
    """Longest history in training and evaluation, items."""
    crop: Literal["last", "random", "mixed", "cover"] = "last"
    """Of a longer history: its last items, a random stretch, either with even odds, or as many random stretches as cover it once."""
    skip_rate: float = 0.0
    """Share of items left out of each history, drawn anew each epoch."""
    items_per_batch: int = 1024
    """Items in a batch of all processes together; none is padded. However many processes share it, a step computes the same."""
    batching: Literal["similar", "mixed"] = "similar"
    """Whether histories of similar length share a batch, which plain attention is faster with, or any. With long histories, many processes share mixed batches more evenly."""
    balance: Literal["cost", "count"] = "cost"
    """How several processes share a batch: so that all need the same time, or by numbers of histories."""
    attention_cost: float = 0.0
    """A history of n items costs n + this x n^2. 0: fitted to measured step times, which makes sums round differently from run to run."""

    codebook_share: float = 0.0
    """Generator: share of the tokenizer's code vectors in the first embeddings. 0: they begin at random."""
    label_smoothing: float = 0.0
    level_weights: tuple[float, ...] = ()
    """Weight of each level's loss. Empty: 1 each."""
    repeat_weight: float = 0.0
    """Generator: weight of unlearning repeats, for data where nobody takes an item twice. 0: repeats are left to the data."""
    num_negatives: int = 0
    """SASRec and retriever: sampled negatives per batch, or of each target (``negative_scope``). 0: softmax over all items."""
    negative_scope: Literal["batch", "target"] = "batch"
    """Retriever: whether all targets of a batch are compared with the same negatives, or each with its own."""
    negative_power: float = 0.0
    """Retriever: negatives are drawn in proportion to their training events to this power, and their logits corrected for it. 0: uniformly."""
    mask_history: bool = False
    """Retriever: whether items of the same history are left out of its negatives."""
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    pages: PagesConfig = field(default_factory=PagesConfig)

    learning_rate: float = 2e-3
    embedding_rate_scale: float = 1.0
    """Factor on the learning rate of embeddings and head."""
    table_rate: float = 0.0
    """Retriever: learning rate of the item table. 0: ``learning_rate``."""
    table_optimiser: TableOptimiser = "adam"
    """Retriever: what updates the touched rows of the item table."""
    table_group: int = 0
    """Several processes: ranks that share one copy of the tables, best those of one machine; the copies of several groups act as one table. 0: all ranks."""
    table_meet_every: int = 0
    """Several groups: steps after which their copies become their mean, each group changing its own in between. 0: they are one table at every step."""
    growth: TableGrowth = field(default_factory=TableGrowth)
    """Retriever: how many rows the item table has, and which of them an item gets that was not seen before."""
    features: tuple[str, ...] = ()
    """Retriever: what items have in common and learn together: ``categories``, ``attributes.NAME``; an item's vector is its row's plus the mean of theirs. And ``actions``:
    what was done with an item of the history adds a vector to it there."""
    publish_every: int = 0
    """Retriever: steps from one publication of the table to the next, the first after ``warmup_steps``; with ``promote`` serving answers with it while training goes on. 0: none."""
    muon_rate: float = 0.0
    """Learning rate of Muon, which then trains the layers' matrices in the place of AdamW. 0: AdamW trains everything."""
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98
    clip_norm: float = 1.0
    warmup_steps: int = 100
    final_rate_share: float = 0.02
    """The cosine ends at this share of the learning rate."""
    ema: float = 0.0
    """Decay of the running average of weights that is validated and kept. 0: the weights themselves. Not for the retriever, whose tables have none."""

    batches_in_flight: int = 6
    """How many batches are on their way through the stages of a step at once. 1: every stage waits for the one before."""
    staleness: int = 0
    """Tables: how many of the latest updates the rows of a step have not seen. 0: none, and no update is hidden behind computing."""
    sync_steps: int = 1000
    """First steps, in which rows miss no update whatever ``staleness`` says."""

    epochs: int = 30
    """0: a checkpoint that knows the catalog's codes is stored as it is."""
    evaluate_every: int = 1
    """Epochs from one validation to the next."""
    patience: int = 5
    """Validations without a better NDCG@10 before training stops."""
    valid_users: int = 1000
    """Users in each validation; 0: all."""
    valid_beam_width: int = 20
    log_every: int = 20
    """Steps from one row of live metrics to the next."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of activations; ``auto``: bfloat16 where the device is built for it, which no CPU counts as."""

    @property
    def item_features(self) -> tuple[str, ...]:
        """Those of ``features`` that items have, whatever is done with them."""
        return tuple(name for name in self.features if name != "actions")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_items", 1, 100_000), ("skip_rate", 0, 0.95), ("items_per_batch", 1, 1 << 40), ("attention_cost", 0, 1e6), ("label_smoothing", 0, 0.99), ("num_negatives", 0, 1 << 24),
            ("negative_power", 0, 2), ("learning_rate", 0, 10), ("table_rate", 0, 10), ("table_group", 0, 1 << 20), ("table_meet_every", 0, 1 << 30), ("publish_every", 0, 1 << 30), ("muon_rate", 0, 10), ("codebook_share", 0, 1), ("repeat_weight", 0, 1000), ("embedding_rate_scale", 0, 1000), ("weight_decay", 0, 10), ("beta1", 0, 1), ("beta2", 0, 1), ("clip_norm", 1e-9, 1e9),
            ("batches_in_flight", 1, 64), ("staleness", 0, 2), ("sync_steps", 0, 1 << 30),
            ("warmup_steps", 0, 1 << 30), ("final_rate_share", 0, 1), ("ema", 0, 0.999999), ("epochs", 0, 100_000), ("evaluate_every", 1, 100_000),
            ("patience", 1, 100_000), ("valid_users", 0, 1 << 30), ("valid_beam_width", 1, 10_000), ("log_every", 1, 1 << 30),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from {low} to {high}")
        if self.ema and self.model_type == "retriever":
            raise ValueError(f"ema is {self.ema}: item tables have no running average, and one of the dense weights alone would not go with them; set ema to 0")
        if self.model_type != "retriever" and (self.features or self.publish_every or self.growth != TableGrowth()):
            raise ValueError(
                f"features, growth and publish_every are of a retriever's tables, and recipe {self.recipe} trains a {self.model_type}: leave them out"
            )
        if self.pages.on and (self.model_type != "generator" or self.repeat_weight or self.crop in ("random", "mixed")):
            raise ValueError(
                f"pages.targets is {self.pages.targets!r}: pages are for a generator (model_type is {self.model_type!r}), without repeat_weight (it is {self.repeat_weight}), and use "
                f"all of a history or its last items (crop is {self.crop!r}): set crop to 'cover' or 'last' and repeat_weight to 0, or leave pages out"
            )
        if not self.epochs and (not self.checkpoint or self.model_type == "retriever"):
            raise ValueError("epochs is 0: only a checkpoint can be stored as it is; name one with checkpoint, or give at least 1")
        for name, choices in (
            ("model_type", ("generator", "sasrec", "retriever")),
            ("negative_scope", ("batch", "target")),
            ("table_optimiser", ("adam", "row-adam", "adagrad")),
            ("crop", ("last", "random", "mixed", "cover")),
            ("batching", ("similar", "mixed")),
            ("balance", ("cost", "count")),
            ("dtype", ("auto", "float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")


def tiny() -> TrainConfig:
    """A small generator that learns a few thousand histories within a minute on one CPU core."""
    shape = GeneratorConfig(
        num_layers=2, hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=128, tie_word_embeddings=False, initializer_range=0.06,
        seen_bias=True, dropout=0.2, embedding_dropout=0.2,
    )  # fmt: skip
    return TrainConfig("tiny", generator=shape, learning_rate=3e-3, codebook_share=0.7, skip_rate=0.15, epochs=14, patience=4, max_items=50)


def small() -> TrainConfig:
    """About a million parameters: public benchmarks on a CPU."""
    shape = GeneratorConfig(
        num_layers=3, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=256, tie_word_embeddings=False, initializer_range=0.06,
        seen_bias=True, dropout=0.2, embedding_dropout=0.1,
    )  # fmt: skip
    return TrainConfig("small", generator=shape, codebook_share=0.7, skip_rate=0.15, label_smoothing=0.02, epochs=30, patience=6, max_items=50)


def pagewise(targets: Form = "parallel") -> TrainConfig:
    """Recipe small by pages: all that was taken of a page is predicted from the history before it; ``pointwise`` is its baseline, one item of each page."""
    return replace(small(), recipe="pointwise" if targets == "point" else "pagewise", crop="cover", pages=PagesConfig(targets))


def base() -> TrainConfig:
    """Tens of millions of parameters, for an accelerator and millions of histories."""
    shape = GeneratorConfig(
        num_layers=8,
        hidden_size=512,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=1536,
        dropout=0.1,
        embedding_dropout=0.1,
        initializer_range=0.02,
    )
    return TrainConfig(
        "base",
        generator=shape,
        learning_rate=6e-4,
        items_per_batch=16384,
        max_items=200,
        crop="cover",
        warmup_steps=1000,
        epochs=20,
        valid_users=5000,
        valid_beam_width=50,
    )


def hybrid(size: Literal["tiny", "small", "base"]) -> TrainConfig:
    """A recipe with linear attention in most layers and softmax in every last one of a group, with as many parameters; the other numbers are those of ``size``."""
    plain = {"tiny": tiny, "small": small, "base": base}[size]()
    layers, width, linear = {
        "tiny": (("linear_attention", "full_attention"), 104, LinearConfig(1, 2, 32, 32)),
        "small": (("linear_attention",) * 3 + ("full_attention",), 112, LinearConfig(2, 4, 32, 32)),
        "base": ((("linear_attention",) * 3 + ("full_attention",)) * 2, 1344, LinearConfig(2, 4, 128, 128)),
    }[size]
    shape = replace(
        plain.generator,
        num_layers=len(layers),
        layer_types=layers,
        linear=linear,
        intermediate_size=width,
        attention_gate=True,
        centred_norms=True,
        rotary_share=0.5,
    )
    return replace(plain, recipe=f"hybrid-{size}", generator=shape)


def pretrained() -> TrainConfig:
    """Goes on from a language model of the Qwen family: config ``checkpoint`` names its folder, and the codes are added to its vocabulary."""
    return TrainConfig(
        "pretrained",
        generator=GeneratorConfig(dropout=0.1),
        codebook_share=0.7,
        learning_rate=1e-4,
        embedding_rate_scale=10.0,
        weight_decay=0.01,
        skip_rate=0.1,
        items_per_batch=2048,
        warmup_steps=200,
        epochs=8,
        patience=2,
        max_items=50,
    )


def sasrec() -> TrainConfig:
    """The baseline: SASRec with a softmax loss over all items."""
    return TrainConfig(
        "sasrec", model_type="sasrec", sasrec=SASRecConfig(dropout=0.3, embedding_dropout=0.3), learning_rate=2e-3, weight_decay=0.01, epochs=14, patience=3
    )


def retriever(size: RetrieverSize, layer: Literal["hstu", "fuxi"] = "hstu") -> TrainConfig:
    """HSTU or FuXi-alpha over item ids in one of five sizes.

    ``large`` and ``long`` are the paper's: 16 layers of 1024 are 83.97 M (HSTU: 5 D^2 + 5 D a layer, and its tables) and 201.5 M (FuXi: 12 D^2) dense
    parameters, for 2048 and 4096 items.
    """
    shape = RETRIEVER_SIZES[size]
    small = size in ("tiny", "small")
    model = RetrieverConfig(
        layer, shape.hidden_size, shape.num_layers, shape.num_heads, shape.max_items, dropout=0.2 if small else 0.1, embedding_dropout=0.2 if small else 0.1
    )
    return TrainConfig(
        f"{'retriever' if layer == 'hstu' else layer}-{size}",
        model_type="retriever",
        retriever=model,
        max_items=shape.max_items,
        crop="last" if size == "tiny" else "cover",
        items_per_batch=shape.items_per_batch,
        num_negatives=shape.num_negatives,
        negative_scope="batch" if small else "target",
        learning_rate=shape.learning_rate,
        weight_decay=0.0,
        warmup_steps=100 if small else 1000,
        epochs=shape.epochs,
        patience=4,
        valid_users=1000 if small else 5000,
    )


@dataclass(frozen=True)
class RetrieverShape:
    """The numbers in which the sizes of the retriever differ."""

    hidden_size: int
    num_layers: int
    num_heads: int
    max_items: int
    items_per_batch: int
    num_negatives: int
    learning_rate: float
    epochs: int


RetrieverSize = Literal["tiny", "small", "medium", "large", "long"]
RETRIEVER_SIZES: dict[RetrieverSize, RetrieverShape] = {
    "tiny": RetrieverShape(32, 2, 2, 50, 1024, 256, 3e-3, 12),
    "small": RetrieverShape(64, 2, 2, 200, 4096, 512, 2e-3, 40),
    "medium": RetrieverShape(256, 8, 4, 512, 16384, 128, 2e-3, 20),
    "large": RetrieverShape(1024, 16, 8, 2048, 32768, 128, 4e-3, 10),
    "long": RetrieverShape(1024, 16, 8, 4096, 32768, 128, 4e-3, 10),
}

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "tiny": tiny,
    "small": small,
    "pagewise": pagewise,
    "pointwise": partial(pagewise, "point"),
    "base": base,
    "hybrid-tiny": partial(hybrid, "tiny"),
    "hybrid-small": partial(hybrid, "small"),
    "hybrid-base": partial(hybrid, "base"),
    "pretrained": pretrained,
    "sasrec": sasrec,
    **{f"retriever-{size}": partial(retriever, size) for size in RETRIEVER_SIZES},
    **{f"fuxi-{size}": partial(retriever, size, "fuxi") for size in RETRIEVER_SIZES},
}


def recipe(name: str, changes: Mapping[str, Any] | None = None) -> TrainConfig:
    """A recipe with some numbers replaced; ``changes`` nests as the configuration does.

    Raises: ValueError that names the recipe or the field.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown: give one of {', '.join(RECIPES)}")
    return overridden(RECIPES[name](), changes or {}, "")


def overridden(config: C, changes: Mapping[str, Any], path: str) -> C:
    """A frozen dataclass with some fields replaced, checked by name and kind."""
    assert is_dataclass(config) and not isinstance(config, type)
    known = {entry.name: getattr(config, entry.name) for entry in fields(config)}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        where = f"{path}{name}"
        if name not in known or name in ("recipe", "level_sizes", "num_items", "vocab_size", "layout", "actions"):
            raise ValueError(f"config field {where!r} is unknown or not to be set: known are {', '.join(path + n for n in known)}")
        default = known[name]
        if is_dataclass(default):
            if not isinstance(value, Mapping):
                raise ValueError(f"config {where} is {value!r}: give an object of its fields")
            values[name] = overridden(default, value, f"{where}.")
        elif name == "features":
            if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) and x for x in value) or len(set(value)) != len(value):
                raise ValueError(f'config {where} is {value!r}: give a list of names, each once, such as ["categories"]')
            values[name] = tuple(value)
        elif name == "layer_types":
            if not isinstance(value, (list, tuple)) or not all(isinstance(x, str) for x in value):
                raise ValueError(f'config {where} is {value!r}: give a list with a name for each layer, such as ["linear_attention", "full_attention"]')
            values[name] = tuple(value)
        elif isinstance(default, tuple):
            if not isinstance(value, (list, tuple)) or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in value):
                raise ValueError(f"config {where} is {value!r}: give a list of numbers")
            values[name] = tuple(float(x) for x in value)
        elif isinstance(default, (bool, str)):
            if type(value) is not type(default):
                raise ValueError(f"config {where} is {value!r}: give a {type(default).__name__} such as {default!r}")
            values[name] = value
        else:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(default, int) and value != int(value)):
                raise ValueError(f"config {where} is {value!r}: give {'a whole number' if isinstance(default, int) else 'a number'} such as {default!r}")
            values[name] = type(default)(value)
    return replace(config, **values)
