"""What is live, as it is answered: what the registry wants beside what this process has loaded."""

from __future__ import annotations

from semantide.services.serving.contract import LiveAnswer, SplitAnswer, VariantAnswer
from semantide.services.serving.registry_state import LIVE, RegistryState
from semantide.services.serving.service import Service


def split_answer(service: Service, state: RegistryState) -> SplitAnswer:
    """How users are divided, and what of it is loaded."""
    lineup, errors = service.swapper.lineup, service.swapper.status.variant_errors
    answers = [
        VariantAnswer(
            name=variant.name,
            model=variant.pair.model,
            catalog=variant.pair.catalog,
            share=variant.share,
            loaded=lineup is not None and variant.name in lineup.bundles and lineup.bundles[variant.name].pair == variant.pair,
            error=errors.get(variant.name),
        )
        for variant in state.split.variants
    ]
    if state.live is not None:
        loaded = lineup is not None and lineup.live.pair == state.live
        live = state.live.model_dump() | {"name": LIVE, "share": state.split.shares[LIVE], "loaded": loaded, "error": service.swapper.status.error}
        answers.insert(0, VariantAnswer.model_validate(live))
    return SplitAnswer(salt=state.split.salt, variants=answers)


def live_answer(service: Service, state: RegistryState) -> LiveAnswer:
    """What the registry wants, and what this process serves."""
    status, live = service.swapper.status, state.live
    return LiveAnswer(
        model=live.model if live else None,
        catalog=live.catalog if live else None,
        loaded_model=status.loaded.model if status.loaded else None,
        loaded_catalog=status.loaded.catalog if status.loaded else None,
        retriever=state.retriever,
        loaded_retriever=service.retrievers.current.ref if service.retrievers.current else None,
        retriever_error=service.retrievers.error,
        following=state.following,
        error=status.error,
        version=state.version,
        previous=list(state.previous),
    )
