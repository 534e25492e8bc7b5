// Load program for NATS JetStream: scheduled messages, and a pull consumer with explicit acknowledgements.
package main

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"tickwheel/peers/load"
)

const (
	stream      = "bench"
	dueSubject  = "due"
	replicas    = 3
	createTries = 100
	ackPending  = 40_000
	fetched     = 5_000
)

func main() {
	arguments, tally := load.Parse(), load.NewTally()
	connection, err := nats.Connect(arguments.Address)
	load.Must(err)
	publisher, err := jetstream.New(connection,
		jetstream.WithPublishAsyncMaxPending(2*arguments.Window), jetstream.WithPublishAsyncTimeout(time.Minute))
	load.Must(err)
	create(publisher)
	if arguments.Case == "deliver" {
		defer consume(arguments.Address, tally).Stop()
	}
	load.Run(arguments, tally, func(pace *load.Pace, due load.Span) {
		produce(publisher, arguments, tally, pace, due)
	})
}

// create makes the stream; right after their start the servers have no leader that could.
func create(js jetstream.JetStream) {
	var err error
	for range createTries {
		_, err = js.CreateOrUpdateStream(context.Background(), jetstream.StreamConfig{
			Name:              stream,
			Subjects:          []string{"at.>", dueSubject},
			Storage:           jetstream.FileStorage,
			Replicas:          replicas,
			AllowMsgSchedules: true,
		})
		if err == nil {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	load.Must(err)
}

// produce publishes each message to a subject of its own, since a subject has one schedule, with a window under way.
func produce(js jetstream.JetStream, arguments load.Arguments, tally *load.Tally, pace *load.Pace, due load.Span) {
	slots := make(chan struct{}, arguments.Window)
	var waiting sync.WaitGroup
	for pace.Turn(1) {
		payload, number, dueMs := tally.Next(arguments.Bytes, due)
		message := nats.NewMsg("at." + strconv.FormatInt(number, 10))
		message.Header.Set("Nats-Schedule", "@at "+time.UnixMilli(dueMs).UTC().Format("2006-01-02T15:04:05.000Z07:00"))
		message.Header.Set("Nats-Schedule-Target", dueSubject)
		message.Data = payload
		slots <- struct{}{}
		answer, err := js.PublishMsgAsync(message)
		if err != nil {
			tally.Failed(1, err)
			<-slots
			continue
		}
		waiting.Add(1)
		go func() {
			defer waiting.Done()
			select {
			case <-answer.Ok():
				tally.Accepted(number)
			case err := <-answer.Err():
				tally.Failed(1, err)
			}
			<-slots
		}()
	}
	waiting.Wait()
}

func consume(address string, tally *load.Tally) jetstream.ConsumeContext {
	connection, err := nats.Connect(address)
	load.Must(err)
	js, err := jetstream.New(connection)
	load.Must(err)
	consumer, err := js.CreateOrUpdateConsumer(context.Background(), stream, jetstream.ConsumerConfig{
		Durable:       "bench",
		FilterSubject: dueSubject,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       time.Minute,
		MaxAckPending: ackPending,
	})
	load.Must(err)
	running, err := consumer.Consume(func(message jetstream.Msg) {
		tally.Delivered([][]byte{message.Data()}, load.NowMs())
		load.Must(message.Ack())
	}, jetstream.PullMaxMessages(fetched))
	load.Must(err)
	return running
}
