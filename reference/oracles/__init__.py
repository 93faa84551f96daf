"""A second, naive implementation of the whole model in float64, one file per concept.

The oracles exist to disagree with `inference/` whenever either of the two is wrong, so they share nothing with it: this
folder imports the standard library and numpy only, write.py also torch and safetensors (a test walks the imports). They
are written for obviousness: plain loops over positions, heads and groups, one sequence at a time, no cache (everything
is recomputed from position 0).

Entry points
    reference.oracles.model.oracle_forward   one prompt through the backbone, every dump point
    reference.oracles.dspark.oracle_draft    one drafting step after a prompt, every dump point
    reference.oracles.write.write_traces     the same numbers as a trace folder

Precision: weights are dequantized in float32, rounded once to BF16 and widened to float64; all arithmetic is float64.
Only the fake quantizers of the caches and the rotation angles keep their float32 definition, because there the float32
rounding *is* the definition. The inputs of linear layers are not quantized (the project's "float32" numerics).
"""
