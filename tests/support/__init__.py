"""What tests share: tables of cases, plain implementations, jobs of many processes, programs."""
