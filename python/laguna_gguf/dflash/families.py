"""Which kind of drafter a file is, when it is not Laguna's: named, so that a refusal says what was found."""

from collections.abc import Iterable, Mapping
from typing import Any

LAGUNA = "laguna-dflash"

FAMILIES = {
    LAGUNA: "a Laguna DFlash drafter",
    "dflash": "a generic DFlash drafter (Qwen family)",
    "dflash2": "a generic DFlash2 drafter (Qwen family)",
    "dspark": "a DSpark drafter",
    "eagle3": "an EAGLE-3 drafter",
    "eagle": "an EAGLE drafter",
    "medusa": "Medusa heads",
}
"""Family -> what to call it."""

_IN_NAMES = ("dspark", "dflash2", "eagle3", "eagle", "medusa", "dflash")
"""Parts of architecture names, the more specific first."""
_MARKOV = "markov"
"""DSpark is DFlash with a Markov head: files of every dialect show it in keys or tensor names."""
_SELECTOR = "selector_"
"""Tensors of DFlash2's candidate selector."""
_LAGUNA_HF = "DFlashLagunaForCausalLM"


def family_of_name(architecture: object) -> str | None:
    """The family that an architecture's name shows (GGUF's general.architecture or config.json's architectures)."""
    plain = str(architecture).lower().replace("-", "").replace("_", "")
    return next((family for family in _IN_NAMES if family in plain), None)


def family_of_config(config: Mapping[str, Any]) -> str | None:
    """The family of a Hugging Face config.json, None when it is no drafter's."""
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if names == [_LAGUNA_HF]:
        return LAGUNA
    names += [config[key] for key in ("speculators_model_type", "model_type") if isinstance(config.get(key), str)]
    found = next((family for family in map(family_of_name, names) if family is not None), None)
    nested = config.get("dflash_config")
    keys = [*config, *(nested if isinstance(nested, Mapping) else ())]
    if found in ("dflash", None) and any(_MARKOV in str(key) or "dspark" in str(key) for key in keys):
        return "dspark"
    return "dflash" if found is None and "dflash_config" in config else found


def family_of_gguf(architecture: object, keys: Iterable[str], tensors: Iterable[str]) -> str | None:
    """The family of a GGUF file by its architecture, except that Laguna's own is called "dflash" here too."""
    found = family_of_name(architecture)
    if found != "dflash":
        return found
    names = [*keys, *tensors]
    if any(_MARKOV in name or "dspark" in name for name in names):
        return "dspark"
    return "dflash2" if any(name.startswith(_SELECTOR) for name in names) else found
