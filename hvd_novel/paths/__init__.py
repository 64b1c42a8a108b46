"""Network paths of a job: which there are, how a launcher is told to take one, and which is the fastest.

What carries MPI, Gloo and NCCL is fixed when processes start. So paths are tried by short jobs under the user's own
launcher, before the job itself starts on the fastest.
"""
