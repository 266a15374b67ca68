"""What ranks are asked of a model of diffusers: its context parallelism, between whose exchanges SCRAM runs."""

import warnings
from unittest.mock import patch

import torch

import scram


def ulysses(mesh):
    """A model whose tokens are shared out, by SCRAM as back end: how far off torch alone, and shapes of what ran."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing it has to say
        import diffusers

        from scram.integrations import diffusers as ours
        from support.families import FAMILIES

        diffusers.logging.set_verbosity_error()
        torch.manual_seed(0)
        model, inputs = FAMILIES["Wan"][0]()
        inputs["hidden_states"] = torch.randn(1, 4, 4, 8, 12)
        model = model.eval().requires_grad_(False)
        want = model(**inputs)[0]
        report = ours.register(search=scram.Search(sweeps=0, seed=0), radius=99, tail=None, impl="reference")
        model.set_attention_backend("scram")
        try:
            with patch.object(torch.accelerator, "device_count", lambda: 1):  # diffusers counts no CPU
                model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=mesh.size()))
            out = model(**inputs, return_dict=False)[0]
        finally:
            ours.unregister()
    return float((out - want).abs().max()), {call.q: call.answer for call in report.calls}
