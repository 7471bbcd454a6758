"""``kdtree evidence``: all there is to show on a GPU, as records for ``docs/evidence``, in windows of minutes."""
