"""What each command and each block of data must keep to, without being run: verbs and options that exist, targets, build arguments, routes and bodies, values, resources."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import typer
import yaml

from semantide.operators.resources import NPUJob, NPUService
from semantide.operators.settings import OperatorSettings
from semantide.services.commandline.main import app
from semantide.services.commandline.overrides import config_of
from semantide.services.reward.recipes import recipe as reward_recipe
from semantide.services.tokenization.recipes import recipe as tokenizer_recipe
from semantide.services.training.alignment_recipes import align_recipe
from semantide.services.training.recipes import recipe as training_recipe
from semantide.shared.config import Settings

from .blocks import ROOT, Block, Command

_MAKEFILE = (ROOT / "Makefile").read_text()
_DOCKERFILE = (ROOT / "Dockerfile").read_text()
_COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
_RESOURCES = {"pods", "nodes", "configmaps", "lease", "crd", "npujobs", "npuservices", "npujob", "npuservice", "node"}


def value_of(words: tuple[str, ...], *names: str) -> list[str]:
    """Values of an option that may come several times, as ``--name value`` or ``--name=value``."""
    found = [after for word, after in pairwise(words) if word in names]
    return found + [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]


# ---- commands


def semantide(command: Command) -> None:
    """The verb is there and takes these words."""
    group: Any = typer.main.get_command(app)
    words = list(command.words[1:])
    while hasattr(group, "commands"):
        assert words and words[0] in group.commands, f"{' '.join(command.words)}: there is no such verb"
        group = group.commands[words.pop(0)]
    context = group.context_class(group, info_name=group.name)
    group.make_parser(context).parse_args(words)  # raises what a user would read
    recipe, config = (value_of(command.words, "--recipe") or [""])[-1], config_of(value_of(command.words, "--set"))
    if command.words[1] == "train":
        training_recipe(recipe or "tiny", config)
    elif command.words[1] == "align":
        align_recipe(recipe or "grpo-sr", config)
    elif command.words[1] == "reward" and "--weigh" not in command.words:
        reward_recipe(recipe, config)
    elif command.words[1] == "tokenize":
        tokenizer_recipe(recipe)


def inline(words: str) -> None:
    """A command within a sentence: its verb and its options are there. Arguments may be left out, options may lack their value."""
    group: Any = typer.main.get_command(app)
    rest = words.split()[1:]
    while hasattr(group, "commands"):
        if not rest or not rest[0].islower():
            return  # VERB, or the program by itself
        assert rest[0] in group.commands, f"`{words}`: there is no such verb"
        group = group.commands[rest.pop(0)]
    known = {option for parameter in group.params for option in (*parameter.opts, *getattr(parameter, "secondary_opts", ()))} | {"--help"}
    for option in re.findall(r"(?<=\s)--[a-z-]+", words):
        assert option in known, f"`{words}`: no such option {option}"


def make(command: Command) -> None:
    """The target and the variables are in the Makefile."""
    targets = set(re.findall(r"^\.PHONY: (.*)$", _MAKEFILE, re.MULTILINE)[0].split())
    for word in command.words[1:]:
        name, equals, _ = word.partition("=")
        assert re.search(rf"\b{name}\b", _MAKEFILE) if equals else word in targets, f"make {word}: not in the Makefile"


def docker(command: Command) -> None:
    """Arguments and stages of the Dockerfile, profiles and services of the compose file."""
    verb, rest = command.words[1], command.words[2:]
    if verb == "build":
        for argument in value_of(rest, "--build-arg"):
            assert re.search(rf"^ARG {argument.partition('=')[0]}\b", _DOCKERFILE, re.MULTILINE), f"--build-arg {argument}: no such argument"
        for stage in value_of(rest, "--target"):
            assert re.search(rf"^FROM .* AS {stage}$", _DOCKERFILE, re.MULTILINE), f"--target {stage}: no such stage"
    elif verb == "compose":
        for profile in value_of(rest, "--profile"):
            assert any(profile in service.get("profiles", ()) for service in _COMPOSE["services"].values()), f"--profile {profile}: no service has it"
        for service in value_of(rest, "--scale"):
            assert service.partition("=")[0] in _COMPOSE["services"], f"--scale {service}: no such service"
    else:
        assert verb == "run", f"docker {verb}: is this command right? Say here how it is checked"


def kubectl(command: Command, manifests: list[dict[str, Any]]) -> None:
    """Kinds that are known, and Deployments that the chart makes."""
    made = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in manifests}
    verb, things = command.words[1], [word for word in command.words[2:] if not word.startswith("-")]
    if verb in ("logs", "exec"):
        place = things[0].replace("ROOM", "training")
        assert place in made or place == "POD", f"kubectl {verb} {place}: the chart makes {sorted(made)}"
    elif verb == "cordon":
        assert things == ["NODE"]
    else:
        assert verb in ("get", "describe"), f"kubectl {verb}: is this command right? Say here how it is checked"
        kinds = {"pod", *(each.rstrip("s") for each in _RESOURCES)}
        for thing in things[0].split(","):
            assert thing.partition("/")[0].rstrip("s") in kinds, f"kubectl {verb} {thing}: what is that?"


def helm(command: Command, render: Callable[..., Any], files: Path) -> None:
    """Real Helm renders the chart with these options."""
    verb, rest = command.words[1], list(command.words[2:])
    if verb == "test":
        return
    assert verb in ("install", "upgrade") and "charts/semantide" in rest, f"{' '.join(command.words)}: say here how it is checked"
    options: list[str] = []
    for name in ("--set", "--values", "--namespace"):
        for value in value_of(tuple(rest), name):
            path = files / value if (files / value).exists() else ROOT / value
            options += [name, str(path) if name == "--values" else value]
    known = {"--set", "--values", "--namespace", "--create-namespace", "--reset-then-reuse-values", "--take-ownership", "--logs"}
    assert {word for word in rest if word.startswith("--")} <= known, f"{' '.join(rest)}: an option that nobody checks"
    outcome = render("template", rest[0], str(ROOT / "charts" / "semantide"), *options)
    assert outcome.returncode == 0, outcome.stderr


def curl(command: Command, document: Mapping[str, Any]) -> None:
    """The route is there, and the body is one that it takes."""
    address = next(word for word in command.words[1:] if "/v1/" in word or re.search(r"/(healthz|readyz|metrics)", word))
    path = "/" + re.sub(r"^(https?://[^/]+|\$\w+)/", "", address).partition("?")[0]
    bodies = value_of(command.words, "-d", "--data")
    method = (value_of(command.words, "-X") or ["post" if bodies else "get"])[0].lower()
    patterns = {each: re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(each)) for each in document["paths"]}
    route = next((each for each, pattern in patterns.items() if re.fullmatch(pattern, path) and method in document["paths"][each]), None)
    assert route is not None, f"{method.upper()} {path}: no such route"
    for body in bodies:
        content = document["paths"][route][method]["requestBody"]["content"]["application/json"]
        jsonschema.validate(json.loads(body), {**content["schema"], "components": document["components"]})


def python(command: Command) -> None:
    """The script is there and knows its options."""
    if command.words[1] == "-m":
        assert command.words[2] in ("venv", "semantide.operators"), command.words
    elif command.words[1] != "-c":
        text = (ROOT / command.words[1]).read_text()
        for option in (word for word in command.words[2:] if word.startswith("--")):
            assert f'"{option}"' in text, f"{command.words[1]} has no option {option}"


# ---- data


def yaml_block(block: Block, render: Callable[..., Any], files: Path) -> None:
    """Resources of the operator, else values of the chart."""
    documents = [each for each in yaml.safe_load_all(block.text) if each]
    for number, each in enumerate(documents):
        if kind := {"NPUJob": NPUJob, "NPUService": NPUService}.get(each.get("kind", "")):
            kind.parse({**each, "metadata": {**each["metadata"], "namespace": "shop"}})
            continue
        name = re.match(r"# (\S+\.yaml)\n", block.text)
        path = files / (name[1] if name else f"values-{block.line}-{number}.yaml")
        path.write_text(yaml.safe_dump(each))
        outcome = render("template", "shop", str(ROOT / "charts" / "semantide"), "--values", str(path))
        assert outcome.returncode == 0, f"{block}: {outcome.stderr}"


def json_block(block: Block) -> None:
    """A card beside a checkpoint's ``config.json``."""
    content = json.loads(block.text)
    assert set(content) == {"level_sizes", "layout"} and set(content["layout"]) == {"begin", "between", "end", "firsts"}, f"{block}: say here what it is"
    assert len(content["layout"]["firsts"]) == len(content["level_sizes"])


def ini_block(block: Block) -> None:
    """A unit of systemd: its variables are settings, its command is a verb."""
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block.text)
    for setting in unit["Service"]["Environment"].split():
        assert_variable(setting.partition("=")[0])
    semantide(Command(tuple(unit["Service"]["ExecStart"].split()), ""))


def promql_block(block: Block) -> None:
    """Its metrics are made somewhere in the code."""
    for name in re.findall(r"\bsemantide_[a-z_]+", block.text):
        base = re.sub(r"(_total|_bucket|_sum|_count)$", "", name)
        assert {base, base.removesuffix("_seconds"), base.removesuffix("_bytes")} & metrics(), f"{block}: nothing shows {name}"


@cache
def metrics() -> frozenset[str]:
    """Names that the code gives its metrics."""
    found: set[str] = set()
    for folder in ("shared", "services", "operators"):
        for path in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r'"(semantide_[a-z_]+)"', path.read_text()))
    return frozenset(found)


@cache
def variables() -> frozenset[str]:
    """Environment variables that something reads: settings, and what the code, the compose file or the suites name themselves."""
    found = {f"SEMANTIDE_{field.upper()}" for field in Settings.model_fields} | {
        f"SEMANTIDE_OPERATOR_{field.upper()}" for field in OperatorSettings.model_fields
    }
    places = [
        *(path for folder in ("client", "shared", "services", "operators", "tests") for path in (ROOT / folder).rglob("*.py")),
        ROOT / "docker-compose.yml",
        ROOT / ".ci" / "run",
    ]
    for path in places:
        found.update(re.findall(r"\bSEMANTIDE_[A-Z_]+[A-Z]\b", path.read_text()))
    return frozenset(found)


def assert_variable(name: str) -> None:
    """An environment variable of ours is read by somebody."""
    assert not name.startswith("SEMANTIDE_") or name in variables(), f"nothing reads {name}"


def load(name: str, path: Path) -> ModuleType:
    """A script that is no part of a package."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
