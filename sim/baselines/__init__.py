"""Published and common policies to compare with: rlhfless.scaling.policies.registry has their names."""
