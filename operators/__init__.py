"""The Kubernetes operator: custom resources, gang placement of NPU pods, load balancing. Never loads torch."""
