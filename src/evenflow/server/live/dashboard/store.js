// Recent steps, as columns in ring buffers: a step that only decodes allocates nothing.
// Steps are numbered from 0 in order of arrival; `first` to `end` are kept.

const STEPS = 4096;
const CHUNKS = 8192;

export class StepStore {
  constructor() {
    this.end = 0;
    this.step = new Float64Array(STEPS);
    this.at = new Float64Array(STEPS);
    this.seconds = new Float32Array(STEPS);
    this.predicted = new Float32Array(STEPS);
    this.decodeSeconds = new Float32Array(STEPS);
    this.decodes = new Int32Array(STEPS);
    this.tokens = new Int32Array(STEPS);
    this.target = new Float32Array(STEPS);
    this.late = new Int32Array(STEPS);
    this.chunkFrom = new Float64Array(STEPS);
    this.chunkEnd = new Float64Array(STEPS);
    this.numChunks = 0;
    this.chunkRequest = new Float64Array(CHUNKS);
    this.chunkStart = new Int32Array(CHUNKS);
    this.chunkLength = new Int32Array(CHUNKS);
    this.chunkSeconds = new Float32Array(CHUNKS);
    this.chunkReason = new Array(CHUNKS).fill("");
  }

  get first() {
    return Math.max(0, this.end - STEPS);
  }

  slot(number) {
    return number % STEPS;
  }

  chunkSlot(number) {
    return number % CHUNKS;
  }

  add(columns) {
    for (let row = 0; row < columns.at.length; row++) {
      const slot = this.slot(this.end);
      this.step[slot] = columns.step[row];
      this.at[slot] = columns.at[row];
      this.seconds[slot] = columns.seconds[row];
      this.predicted[slot] = columns.predicted[row];
      this.decodeSeconds[slot] = columns.decode_seconds[row];
      this.decodes[slot] = columns.decodes[row];
      this.tokens[slot] = columns.tokens[row];
      this.target[slot] = columns.target[row] ?? NaN;
      this.late[slot] = columns.late[row];
      this.chunkFrom[slot] = this.numChunks;
      for (const chunk of columns.chunks[row]) this.addChunk(chunk);
      this.chunkEnd[slot] = this.numChunks;
      this.end += 1;
    }
  }

  addChunk([request, start, length, reason, seconds]) {
    const slot = this.chunkSlot(this.numChunks);
    this.chunkRequest[slot] = request;
    this.chunkStart[slot] = start;
    this.chunkLength[slot] = length;
    this.chunkReason[slot] = reason;
    this.chunkSeconds[slot] = seconds;
    this.numChunks += 1;
  }

  // One step as an object, to describe it.
  get(number) {
    const slot = this.slot(number);
    const chunks = [];
    for (let chunk = this.chunkFrom[slot]; chunk < this.chunkEnd[slot]; chunk++) {
      const place = this.chunkSlot(chunk);
      chunks.push({
        request: this.chunkRequest[place],
        start: this.chunkStart[place],
        length: this.chunkLength[place],
        reason: this.chunkReason[place],
        seconds: this.chunkSeconds[place],
      });
    }
    return {
      step: this.step[slot],
      at: this.at[slot],
      seconds: this.seconds[slot],
      predicted: this.predicted[slot],
      decodeSeconds: this.decodeSeconds[slot],
      decodes: this.decodes[slot],
      late: this.late[slot],
      chunks,
    };
  }

  // Tokens per second over the last `seconds` before `now`.
  rate(now, seconds) {
    let tokens = 0;
    for (let number = this.end - 1; number >= this.first && this.at[this.slot(number)] > now - seconds; number--) {
      tokens += this.tokens[this.slot(number)];
    }
    return tokens / seconds;
  }
}
