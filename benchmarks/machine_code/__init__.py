"""What the kernels' machine code consists of and executes, without a GPU."""
