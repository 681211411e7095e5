#!/bin/sh
#SBATCH --job-name=share
#SBATCH --output=share-%j.out
#SBATCH --ntasks=1
# One step in a container with 4 GiB and half of the compute of a GPU. BUNDLE is a folder with an OCI bundle.
export GPUSHARE_MEMORY=4GiB GPUSHARE_CORES=50
srun --container="${BUNDLE:?set BUNDLE to the folder of an OCI bundle}" nvidia-smi
