"""`penstock bisect`: the step and the episodes of a run whose removal undoes a collapse."""
