"""The HTTP interface: one module per resource."""
