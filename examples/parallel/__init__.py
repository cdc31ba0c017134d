"""Training of one model on several ranks in plain PyTorch: FSDP2, tensor parallel, context parallel.

    PYTHONPATH=examples python -m parallel              # two processes of gloo, on a CPU
    PYTHONPATH=examples python -m parallel context --ranks 4

Each recipe takes a step's loss and gradients on all ranks, and compares them with one process.
"""
