"""`python -m dynamo_vllm …` is `dynamo-vllm worker …`."""

import sys

from dynamo_vllm.cli.main import main

if __name__ == "__main__":
    main(["worker", *sys.argv[1:]])
