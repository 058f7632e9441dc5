"""Where parameters meet groups: parallel linears, attention, MLPs, norms, embedding and loss, each split over ranks."""
