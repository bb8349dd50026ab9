"""Advantages, KL and losses: pure functions on arrays and tensors. Import the modules themselves.

`base` is the interface, `batch` and `passes` the data of a step (numpy only, so packing does not load torch),
`group_based` and `ppo` the built-in algorithms, `losses` and `kl` what they share, `supervised` SFT, DPO and
Bradley-Terry.
"""
