"""How much memory a run needs, on which device and in which phase, before anything is started."""
