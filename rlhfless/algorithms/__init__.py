"""Advantages, KL and losses: pure functions on arrays and tensors. Import the modules directly.

`base` is the interface; `batch` and `passes` hold a step's data (numpy only, so packing does not load torch);
`group_based` and `ppo` are the built-in algorithms, which share `losses` and `kl`; `supervised` holds SFT, DPO and
Bradley-Terry.
"""
