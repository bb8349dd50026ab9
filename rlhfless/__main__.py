"""`python -m rlhfless`: the command `rlhfless`."""

import os
import sys

if __name__ == "__main__":
    # Python has put the current folder first; the command searches it last (rlhfless.spec.imports).
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        sys.path.append(sys.path.pop(0))

    from rlhfless.cli.main import main

    main()
