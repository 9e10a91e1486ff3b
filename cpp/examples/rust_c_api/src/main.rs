// SPDX-License-Identifier: BSD-3-Clause
//! Trains a network of two layers on several ranks, with gradients computed by hand, and compares
//! each step with one process that has all samples:
//!
//!     torchrun --no-python --nproc_per_node=2 target/release/apex_rust

mod apex;
mod ffi;

use apex::{Error, Group, Reducer, Result, Tensor};

const SAMPLES: usize = 400;
const BATCH: usize = 25; // does not divide by two: the ranks' parts differ in size
const INPUTS: usize = 6;
const HIDDEN: usize = 16;
const EPOCHS: usize = 20;
const BUCKET_BYTES: i64 = 128; // the second layer's weights fill one
const RATE: f64 = 0.2;
const TOLERANCE: f64 = 1e-10; // of the largest gradient

/// Uniform in [-1, 1), by a linear congruential generator.
struct Random(u32);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(1664525).wrapping_add(1013904223);
        f64::from(self.0) / 2147483648.0 - 1.0
    }
}

struct Sample {
    x: [f64; INPUTS],
    y: f64,
}

/// In this order: weights and bias of the first layer, weights and bias of the second.
fn initial_parameters(random: &mut Random) -> Vec<Tensor> {
    let sizes: [&[usize]; 4] = [&[HIDDEN, INPUTS], &[HIDDEN], &[HIDDEN], &[1]];
    let mut parameters: Vec<Tensor> = sizes.iter().map(|sizes| Tensor::zeros(sizes)).collect();
    for index in [0, 2] {
        parameters[index].data.fill_with(|| 0.5 * random.next());
    }
    parameters
}

/// Gives each gradient of the summed squared error to `ready` as soon as it is computed. Returns
/// the sum.
fn backward(
    parameters: &[Vec<f64>],
    samples: &[Sample],
    mut ready: impl FnMut(usize, &[f64]) -> Result<()>,
) -> Result<f64> {
    let [w1, b1, w2, b2] = parameters else {
        unreachable!("initial_parameters() makes four");
    };
    let mut loss = 0.0;
    let mut of_output = Vec::new(); // the gradient of each sample's output
    let mut hidden = Vec::new();
    let (mut of_w2, mut of_b2) = (vec![0.0; HIDDEN], vec![0.0]);
    for sample in samples {
        let mut output = b2[0];
        for unit in 0..HIDDEN {
            let weights = &w1[unit * INPUTS..(unit + 1) * INPUTS];
            let sum: f64 = weights.iter().zip(&sample.x).map(|(w, x)| w * x).sum();
            hidden.push((b1[unit] + sum).tanh());
            output += w2[unit] * hidden[hidden.len() - 1];
        }
        let error = output - sample.y;
        loss += error * error;
        of_output.push(2.0 * error);
        of_b2[0] += 2.0 * error;
        for (of_w, h) in of_w2.iter_mut().zip(&hidden[hidden.len() - HIDDEN..]) {
            *of_w += 2.0 * error * h;
        }
    }
    ready(3, &of_b2)?;
    ready(2, &of_w2)?; // travels while the loop below runs
    let (mut of_w1, mut of_b1) = (vec![0.0; HIDDEN * INPUTS], vec![0.0; HIDDEN]);
    for (number, sample) in samples.iter().enumerate() {
        for unit in 0..HIDDEN {
            let h = hidden[number * HIDDEN + unit];
            let of_sum = of_output[number] * w2[unit] * (1.0 - h * h);
            of_b1[unit] += of_sum;
            for (input, x) in sample.x.iter().enumerate() {
                of_w1[unit * INPUTS + input] += of_sum * x;
            }
        }
    }
    ready(1, &of_b1)?;
    ready(0, &of_w1)?;
    Ok(loss)
}

/// One step of one process with the whole batch, the reference. Returns the gradients of the mean.
fn step_alone(parameters: &mut [Vec<f64>], batch: &[Sample]) -> Result<Vec<Vec<f64>>> {
    let mut gradients = vec![Vec::new(); parameters.len()];
    backward(parameters, batch, |index, values| {
        gradients[index] = values
            .iter()
            .map(|value| value / batch.len() as f64)
            .collect();
        Ok(())
    })?;
    for (values, gradient) in parameters.iter_mut().zip(&gradients) {
        for (value, slope) in values.iter_mut().zip(gradient) {
            *value -= RATE * slope;
        }
    }
    Ok(gradients)
}

fn copied(tensors: &[Tensor]) -> Vec<Vec<f64>> {
    tensors.iter().map(|tensor| tensor.data.clone()).collect()
}

/// Whether each number is near the expected one, by the largest of these.
fn close(found: &[Vec<f64>], expected: &[Vec<f64>]) -> bool {
    let (found, expected) = (found.concat(), expected.concat());
    let largest = expected.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= TOLERANCE * largest;
    found.iter().zip(&expected).all(near)
}

fn train(group: &Group) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let mut random = Random(1); // all ranks draw the same samples
    let mut sample = || {
        let x: [f64; INPUTS] = std::array::from_fn(|_| random.next());
        let y = x.iter().map(|value| value.sin()).sum();
        Sample { x, y }
    };
    let samples: Vec<Sample> = (0..SAMPLES).map(|_| sample()).collect();

    let own = initial_parameters(&mut Random(100 + rank as u32)); // the reducer takes rank 0's
    let mut reducer = Reducer::weighted(group, own, BUCKET_BYTES)?;
    let mut alone = copied(reducer.parameters());
    for epoch in 1..=EPOCHS {
        let mut loss = [0.0];
        for batch in samples.chunks(BATCH) {
            let part = batch.len() * rank / ranks..batch.len() * (rank + 1) / ranks;
            let mine = &batch[part];
            let parameters = copied(reducer.parameters());
            reducer.set_weight(mine.len() as f64)?;
            loss[0] += backward(&parameters, mine, |index, values| {
                reducer.gradient_ready(index, values)
            })?;
            reducer.synchronize()?;
            for (values, gradient) in reducer.parameters_and_gradients() {
                for (value, slope) in values.iter_mut().zip(gradient) {
                    *value -= RATE * slope;
                }
            }
            let expected = step_alone(&mut alone, batch)?;
            if !close(&copied(reducer.gradients()), &expected) {
                return Err(Error(format!(
                    "rank {rank}, epoch {epoch}: gradients differ from those of one process"
                )));
            }
        }
        group.all_reduce(&mut loss, ffi::APEX_SUM)?;
        if rank == 0 && epoch % 5 == 0 {
            println!("epoch {epoch}: loss {:.6}", loss[0] / SAMPLES as f64);
        }
    }
    let parameters = copied(reducer.parameters());
    if !group.ranks_agree(&parameters.concat())? {
        return Err(Error("the ranks have different parameters".to_string()));
    }
    if !close(&parameters, &alone) {
        return Err(Error(
            "parameters differ from those of one process".to_string(),
        ));
    }
    if rank == 0 {
        println!("ranks: {ranks}; parameters bitwise equal, gradients those of one process");
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    match Group::join(c"gloo").and_then(|group| train(&group)) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("apex_rust: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
