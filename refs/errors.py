"""Errors by name. The names are those of the engine protocol, so that an adapter can map them one to one."""

from __future__ import annotations


class RefError(ValueError):
    """Base of all errors the reference raises on purpose; after one, the model stays usable."""


class ConfigError(RefError):
    """A field is unknown, missing, of the wrong type or out of range: ``FILE: FIELD: reason``."""


class MissingTensor(RefError):
    """A tensor is not there, or has another shape or type: ``FILE: TENSOR: reason``."""


class TokenError(RefError):
    """A token id lies outside the vocabulary."""


class ContextOverflow(RefError):
    """The rows do not fit the context."""


class RequestError(RefError):
    """A request is malformed: empty prompt, negative budget, bad parents, bad path."""


class DrafterError(RefError):
    """Draft logits have the wrong width or cannot be ranked."""


class NonFiniteError(RefError):
    """A router score or a logit is NaN or infinite."""


class CheckpointError(RefError):
    """Trained weights or their held-out text cannot be used."""
