"""`python -m localllm` is the command `localllm`."""

from localllm.cli.main import main

if __name__ == "__main__":
    main()
