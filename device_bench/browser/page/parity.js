// Does this device compute what the checkpoint computes? The golden vectors of the bundle against
// its logits, with the figures and limits of `edgeqkv verify` (export/verify.py).

/** Null when the rows agree, else why they do not. Rows are Float32Array [V]; V >= `used`. */
export function mismatch(got, expected, used, limits) {
  const count = expected.length * used;
  let sum = 0;
  let squares = 0;
  for (const row of expected) {
    for (let i = 0; i < used; i++) sum += row[i];
  }
  const mean = sum / count;
  for (const row of expected) {
    for (let i = 0; i < used; i++) squares += (row[i] - mean) ** 2;
  }
  const std = Math.max(Math.sqrt(squares / count), 1e-30);
  let most = 0;
  let kl = 0;
  let cosine = 1;
  for (let r = 0; r < expected.length; r++) {
    const [a, b] = [got[r], expected[r]];
    for (let i = 0; i < used; i++) {
      if (!Number.isFinite(a[i])) return "a logit is not a finite number";
      most = Math.max(most, Math.abs(a[i] - b[i]));
    }
    kl = Math.max(kl, divergence(a, b, used));
    cosine = Math.min(cosine, similarity(a, b, used));
  }
  if (most / std > limits.max_abs) {
    return `logits differ by ${(most / std).toPrecision(2)} standard deviations; allowed: ${limits.max_abs}`;
  }
  if (kl > limits.kl) return `KL divergence is ${kl.toPrecision(2)} nats; allowed: ${limits.kl}`;
  if (cosine < limits.cosine) return `cosine similarity is ${cosine.toFixed(6)}; allowed: ${limits.cosine}`;
  return null;
}

function logSum(row, used) {
  let top = -Infinity;
  for (let i = 0; i < used; i++) top = Math.max(top, row[i]);
  let sum = 0;
  for (let i = 0; i < used; i++) sum += Math.exp(row[i] - top);
  return top + Math.log(sum);
}

/** KL(expected || got), nats. */
function divergence(got, expected, used) {
  const [q, p] = [logSum(got, used), logSum(expected, used)];
  let sum = 0;
  for (let i = 0; i < used; i++) {
    const logp = expected[i] - p;
    sum += Math.exp(logp) * (logp - (got[i] - q));
  }
  return sum;
}

function similarity(a, b, used) {
  let [dot, aa, bb] = [0, 0, 0];
  for (let i = 0; i < used; i++) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return dot / Math.max(Math.sqrt(aa * bb), 1e-30);
}
