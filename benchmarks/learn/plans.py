"""Which runs answer which question."""

from __future__ import annotations

from collections.abc import Sequence

from .loop import Run

SEEDS = (0, 1, 2)
TASKS = ("video", "classify", "detect, 128x128", "generate, CIFAR-10", "generate, MNIST")
LARGE = ("detect, 256x256", "classify, 128x128")
PAIR = ("dense", "tail")
OTHERS = ("windows", "local", "strided")
PICTURES = (1000, 5000, None)
NOISE = ("dense", "dense, dropout", "tail", "tail, fixed seed", "tail, few sweeps")
TAIL = {"plain": "tail", "digits": "32 clusters"}  # as many clusters as keys would be dense attention
LOCAL = {"plain": "local", "digits": "local, 64 keys"}
MORE = {"generate, CIFAR-10": "tail, 4 matches, 2048 drawn", "video": "tail, 4 matches"}  # the default is not enough
# Clusters of stretches: on 784 positions the default's 64 of every 64 would be one cluster a key.
CAUSAL = {"generate, CIFAR-10": "causal clusters", "generate, MNIST": "causal clusters, few"}
QUESTIONS = ("tasks", "more", "large", "noise", "bias", "others", "causal", "small")


def runs(question: str) -> list[Run]:
    """Seed by seed, the longest first."""
    if question == "tasks":
        return [Run(task, name, seed) for seed in SEEDS for task in TASKS for name in PAIR]
    if question == "more":
        return [Run(task, name, seed) for seed in SEEDS for task, name in MORE.items()]
    if question == "large":
        return [Run(task, name, seed) for seed in SEEDS for task in LARGE for name in PAIR]
    if question == "others":
        return [Run(task, name, seed) for seed in SEEDS for task in TASKS for name in OTHERS]
    if question == "causal":
        return [Run(task, name, seed) for seed in SEEDS for task in CAUSAL for name in (CAUSAL[task], "dense")]
    if question == "noise":
        return [run for seed in SEEDS for run in _noise("plain", PICTURES, seed)]
    if question == "bias":
        return [run for seed in SEEDS for run in _bias("plain", PICTURES, seed)]
    if question == "small":  # both, for a CPU
        first = [*_noise("digits", (1000,), 0), *_bias("digits", (1000, None), 0)]
        more = [run for made in (_noise, _bias) for seed in SEEDS[1:] for run in made("digits", (1000,), seed)]
        rest = [run for seed in SEEDS for made in (_noise, _bias) for run in made("digits", (None, 5000), seed)]
        return first + more + rest
    raise ValueError(f"question must be one of {QUESTIONS}, got {question!r}")


def _noise(task: str, pictures: Sequence[int | None], seed: int) -> list[Run]:
    return [Run(task, name.replace("tail", TAIL[task]), seed, count) for count in pictures for name in NOISE]


def _bias(task: str, pictures: Sequence[int | None], seed: int) -> list[Run]:
    sets, names = (task, f"{task}, shuffled"), ("dense", TAIL[task], "windows", LOCAL[task])
    return [Run(x, name, seed, count) for x in sets for count in pictures for name in names]
