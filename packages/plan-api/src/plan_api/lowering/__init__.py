"""From a plan to what there is to install on one model: resolved, fused, validated."""
