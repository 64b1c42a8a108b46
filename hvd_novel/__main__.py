"""``python -m hvd_novel``"""

from hvd_novel.cli import main

main()
